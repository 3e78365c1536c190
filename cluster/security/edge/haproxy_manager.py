"""Ray Serve's manager of HAProxy, changed so that the service stays reachable and streams are kept. Imports Serve.

Serve's own notices a dead HAProxy only after three failed health checks, half a minute later; ends its HAProxy when it
dies itself; and restarts HAProxy for a configuration that has not changed. Here a HAProxy that has ended or hangs is
restarted at once, with the routes it had; one whose manager died serves on, until the next manager has the routes and
takes its sockets over; and there are no needless restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...process_tree import is_stopped
from ...ray_compat.haproxy_control import ServeHAProxy, ServeHAProxyManager, use_haproxy_manager
from ...ray_compat.serve_logs import serve_log_name
from .haproxy_launcher import process_start_ticks
from .haproxy_workers import haproxy_workers

POLL_INTERVAL_S = 0.5  # seconds between two checks of HAProxy
REPLY_TIMEOUT_S = 2.0  # seconds in which it must answer
STOPPED_PROBES = 2  # consecutive checks that find it stopped by a signal, after which it counts as hung
SILENT_PROBES = 24  # consecutive unanswered checks, about a minute, after which it counts as hung
START_PROBES = 5  # checks of a HAProxy that a manager finds when it starts
ROUTES_S = 20.0  # seconds that a new manager waits for routes while the previous HAProxy serves
RETRY_DELAY_S = 0.5  # seconds before the next try to start HAProxy

log = logging.getLogger(serve_log_name())


class SteadyHAProxy(ServeHAProxy):
    """HAProxy as one manager runs it, including a process that the previous manager left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._routed = asyncio.Event()  # set when there is an ingress to route to
        self.ending = False

    def set_backend_configs(self, backend_configs: Mapping[str, Any]) -> None:
        super().set_backend_configs(backend_configs)
        if any(backend.servers for backend in backend_configs.values()):
            self._routed.set()

    async def start(self) -> None:
        """Start HAProxy; if one of another manager serves, replace it without closing its ports or a stream."""
        before = haproxy_workers(self.config_path)
        listening = max(
            before, key=process_start_ticks, default=0
        )  # the newest has the ports; older ones finish their streams
        hangs = bool(before) and await self._hangs(listening)
        if hangs:
            _kill(listening)
        if not before or hangs or not await self._is_alive_at_last():
            await super().start()
            return
        log.info(f"HAProxy runs without its manager: {before}; its place is taken when there are routes.")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._routed.wait(), ROUTES_S)
        async with self.config_lock:
            self.write_config()
        await self.launch("-sf", *map(str, before), "-x", self.admin_socket)

    async def reload(self) -> None:
        """Reload HAProxy, unless it has this configuration already: each reload leaves a worker with its streams."""
        self.write_config()
        if self.written_config == self.started_config and self.is_up():
            log.info("HAProxy has this configuration already.")
            return
        try:
            await self.replace()
        except Exception as error:
            raise RuntimeError(f"HAProxy was not reloaded: {error}") from error

    async def stop(self) -> None:
        self.ending = True
        await super().stop()

    async def is_alive(self) -> bool:
        """Return whether HAProxy answers at the admin socket in time."""
        with suppress(TimeoutError, RuntimeError):
            return bool(await asyncio.wait_for(self.send_command("show info"), REPLY_TIMEOUT_S))
        return False

    async def _hangs(self, pid: int) -> bool:
        """Return whether HAProxy does not answer: to one question if a signal has stopped it, else to several, as it
        may only be late.
        """
        for _ in range(START_PROBES):
            if not await self._is_silent():
                return False
            if is_stopped(pid):
                return True
        return True

    async def _is_alive_at_last(self) -> bool:
        """Return whether HAProxy answers one of several questions."""
        for _ in range(START_PROBES):
            if await self.is_alive():
                return True
        return False

    async def _is_silent(self) -> bool:
        """Return whether some process has the admin socket, and does not answer."""
        try:
            await asyncio.wait_for(self.send_command("show info"), REPLY_TIMEOUT_S)
        except TimeoutError:
            return True
        except RuntimeError:  # no process has the socket
            return False
        return False

    async def wait_until_lost(self) -> None:
        """Return when the HAProxy that listens has ended; kill one that hangs."""
        process, stopped, silent = self.process, 0, 0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), POLL_INTERVAL_S)
            if process is not self.process:  # HAProxy was reloaded
                process, stopped, silent = self.process, 0, 0
            if process is None or process.returncode is not None:
                return
            stopped = stopped + 1 if is_stopped(process.pid) else 0
            silent = silent + 1 if stopped or not await self.is_alive() else 0
            if stopped >= STOPPED_PROBES or silent >= SILENT_PROBES:
                log.error(f"HAProxy ({process.pid}) does not respond and is killed, to be started again.")
                _kill(process.pid)

    async def revive(self) -> None:
        """Restart HAProxy as it was, unless the service stops or HAProxy runs."""
        if self.ending or self.is_up():
            return
        began_at = time.monotonic()
        self.write_config()
        await self.launch()
        log.error(f"HAProxy had ended; it runs again after {time.monotonic() - began_at:.1f} s.")


class HAProxyManager(ServeHAProxyManager):
    """Serve's manager, with a HAProxy that is watched. It has Serve's name, by which its process is known."""

    control = SteadyHAProxy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watching = self.loop.create_task(self._watch())

    async def check_health(self) -> bool:
        """Return whether HAProxy is watched. Serve must not check HAProxy itself: it would end all streams."""
        return not self._watching.done()

    async def _watch(self) -> None:
        try:
            await asyncio.shield(self.start_task)
        except Exception:  # noqa: BLE001  Serve learns of it by `ready`, and starts another manager
            return
        while not self.controlled.ending:
            await self.controlled.wait_until_lost()
            async with self.reload_lock:
                try:
                    await self.controlled.revive()
                except Exception:
                    log.exception("HAProxy did not start again; the next try is in %g s", RETRY_DELAY_S)
                    await asyncio.sleep(RETRY_DELAY_S)


def install() -> None:
    """Make Serve's controller start this manager in place of its own. The controller's process calls it first."""
    use_haproxy_manager(HAProxyManager)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
