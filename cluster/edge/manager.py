"""Ray Serve's manager of HAProxy, made to keep the door open and streams whole. Imports Serve.

Serve's own forgets a HAProxy that has died until a health check has missed it thrice, half a minute later; takes its
HAProxy along when it dies itself; and starts HAProxy anew for a configuration that is the old one. Here a HAProxy that
has ended or hangs is started again at once, with the routes of before; one whose manager died serves on, until the
next manager has the routes and takes its sockets over; and nothing is started for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.serve._private import controller, haproxy
from ray.serve._private.constants import SERVE_LOGGER_NAME

from ..processes import is_stopped
from .haproxy_start import began
from .workers import workers_of

LOOK_S = 0.5  # between two looks at HAProxy
ANSWER_S = 2.0  # that it has to answer in
STOPPED_LOOKS = 2  # in a row that find it stopped by a signal: it hangs
SILENT_LOOKS = 24  # in a row without an answer, about a minute: it hangs; fewer may be for a busy machine's sake
START_LOOKS = 5  # likewise of a HAProxy that a manager finds when it starts
ROUTES_S = 20.0  # that a new manager waits for routes while the HAProxy of the one before serves
AGAIN_S = 0.5  # before HAProxy is started again if it did not start

log = logging.getLogger(SERVE_LOGGER_NAME)


class SteadyHAProxy(haproxy.HAProxyApi):  # type: ignore[misc]
    """HAProxy as one manager runs it, and what is left of the manager before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._routed = asyncio.Event()  # there is an ingress to route to
        self._text = self._running_text = ""
        self._ending = False

    def set_backend_configs(self, backend_configs: Mapping[str, Any]) -> None:
        super().set_backend_configs(backend_configs)
        if any(backend.servers for backend in backend_configs.values()):
            self._routed.set()

    async def start(self) -> None:
        """Start HAProxy; where one of another manager serves, take its place without closing the door or a stream."""
        before = workers_of(Path(self.config_file_path))
        listening = max(before, key=began, default=0)  # it has the ports; others have streams from before a reload
        hangs = bool(before) and await self._hangs(listening)
        if hangs:
            _kill(listening)
        if not before or hangs or not await self._answers_at_last():
            await super().start()
            return
        log.info(f"HAProxy runs without its manager: {before}; its place is taken when there are routes.")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._routed.wait(), ROUTES_S)
        async with self._config_lock:
            self._generate_config_file_internal()
        takeover = ["-sf", *map(str, before), "-x", self.cfg.socket_path]
        self._proc = await self._start_and_wait_for_haproxy(*takeover)

    async def reload(self) -> None:
        """Reload HAProxy, unless it has this configuration already: each reload leaves a worker with its streams."""
        self._generate_config_file_internal()
        if self._text == self._running_text and self._is_running():
            log.info("HAProxy has this configuration already.")
            return
        try:
            await self._graceful_reload()
        except Exception as error:
            raise RuntimeError(f"HAProxy was not reloaded: {error}") from error

    async def _graceful_reload(self) -> None:
        if self._is_running():
            await super()._graceful_reload()
        else:
            self._proc = await self._start_and_wait_for_haproxy()

    async def stop(self) -> None:
        self._ending = True
        await super().stop()

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        self._text = Path(self.config_file_path).read_text()

    async def _start_and_wait_for_haproxy(self, *extra_args: str, **options: Any) -> Any:
        text = self._text
        process = await super()._start_and_wait_for_haproxy(*extra_args, **options)
        self._running_text = text
        return process

    async def answers(self) -> bool:
        """Whether a HAProxy says something at the administrator's socket, in time."""
        with suppress(TimeoutError, RuntimeError):
            return bool(await asyncio.wait_for(self._send_socket_command("show info"), ANSWER_S))
        return False

    async def _hangs(self, pid: int) -> bool:
        """Whether it does not answer: once, where a signal has stopped it; on a busy machine one may only be late."""
        for _ in range(START_LOOKS):
            if not await self._is_silent():
                return False
            if is_stopped(pid):
                return True
        return True

    async def _answers_at_last(self) -> bool:
        """Whether one of several questions is answered."""
        for _ in range(START_LOOKS):
            if await self.answers():
                return True
        return False

    async def _is_silent(self) -> bool:
        """Whether someone has the administrator's socket, and does not answer."""
        try:
            await asyncio.wait_for(self._send_socket_command("show info"), ANSWER_S)
        except TimeoutError:
            return True
        except RuntimeError:  # nobody has
            return False
        return False

    async def until_lost(self) -> None:
        """Return when the HAProxy that listens has ended; one that hangs is ended here."""
        process, stopped, silent = self._proc, 0, 0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), LOOK_S)
            if process is not self._proc:  # a reload
                process, stopped, silent = self._proc, 0, 0
            if process is None or process.returncode is not None:
                return
            stopped = stopped + 1 if is_stopped(process.pid) else 0
            silent = silent + 1 if stopped or not await self.answers() else 0
            if stopped >= STOPPED_LOOKS or silent >= SILENT_LOOKS:
                log.error(f"HAProxy ({process.pid}) hangs, and is ended.")
                _kill(process.pid)

    async def revive(self) -> None:
        """Start HAProxy as it was, if it is not to end and none runs."""
        if self._ending or self._is_running():
            return
        began_at = time.monotonic()
        self._generate_config_file_internal()
        self._proc = await self._start_and_wait_for_haproxy()
        log.error(f"HAProxy had ended; it runs again after {time.monotonic() - began_at:.1f} s.")


class HAProxyManager(haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc]
    """Serve's, with a HAProxy that is watched over. The name is Serve's too, by which its process is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        haproxy.HAProxyApi = SteadyHAProxy
        super().__init__(*args, **kwargs)
        self._watching = self.event_loop.create_task(self._watch())

    async def check_health(self) -> bool:
        """Whether HAProxy is watched over. Serve is not to see to HAProxy itself: it would end all streams."""
        return not self._watching.done()

    async def _watch(self) -> None:
        try:
            await asyncio.shield(self._haproxy_start_task)
        except Exception:  # noqa: BLE001  Serve hears of it by `ready`, and starts another manager
            return
        while not self._haproxy._ending:
            await self._haproxy.until_lost()
            async with self._reload_lock:
                try:
                    await self._haproxy.revive()
                except Exception:
                    log.exception("HAProxy did not start again.")
                    await asyncio.sleep(AGAIN_S)


def install() -> None:
    """Have Serve's controller start this manager in place of its own. It calls it in its process as it begins."""
    import ray

    controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
