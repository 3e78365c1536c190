"""Serve's manager of HAProxy and its control of one HAProxy, under names of Motley's, for the classes that change both.

Imports Serve's own modules, in which names are replaced: import this in the controller's and the manager's processes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ray.serve._private import controller, haproxy


class ServeHAProxy(haproxy.HAProxyApi):  # type: ignore[misc]
    """Control of one HAProxy, which remembers the configuration that it wrote last, and that HAProxy was started with.

    Serve calls `start`, `reload`, `stop` and `set_backend_configs`.
    """

    written_config = started_config = ""

    @property
    def config_path(self) -> Path:
        return Path(self.config_file_path)

    @property
    def admin_socket(self) -> str:
        return str(self.cfg.socket_path)

    @property
    def config_lock(self) -> asyncio.Lock:
        """Lock that Serve holds while it writes the configuration as HAProxy starts."""
        lock: asyncio.Lock = self._config_lock
        return lock

    @property
    def process(self) -> Any:
        """Process of the HAProxy that listens; None if this object has started none."""
        return self._proc

    def is_up(self) -> bool:
        """Return whether the process that this object started lives."""
        return bool(self._is_running())

    def write_config(self) -> None:
        """Write the configuration of the present backends."""
        self._generate_config_file_internal()

    async def launch(self, *arguments: str) -> None:
        """Start HAProxy with the written configuration and these further arguments, and wait until it answers."""
        self._proc = await self._start_and_wait_for_haproxy(*arguments)

    async def replace(self) -> None:
        """Start HAProxy with the written configuration in place of the one that runs, which finishes its streams; start
        it if none runs.
        """
        await self._graceful_reload()

    async def send_command(self, command: str) -> str:
        """Return HAProxy's answer at its admin socket. Raises RuntimeError if there is none."""
        return str(await self._send_socket_command(command))

    # What Serve calls itself:

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        self.written_config = self.config_path.read_text()

    async def _start_and_wait_for_haproxy(self, *extra_args: str, **options: Any) -> Any:
        config = self.written_config
        process = await super()._start_and_wait_for_haproxy(*extra_args, **options)
        self.started_config = config
        return process

    async def _graceful_reload(self) -> None:
        if self._is_running():
            await super()._graceful_reload()
        else:
            await self.launch()


class ServeHAProxyManager(haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc]
    """Serve's manager of one node's HAProxy, which controls it by an object of the class `control`."""

    control: type[ServeHAProxy] = ServeHAProxy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        haproxy.HAProxyApi = self.control
        super().__init__(*args, **kwargs)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = self.event_loop
        return loop

    @property
    def controlled(self) -> Any:
        """Object by which HAProxy is controlled."""
        return self._haproxy

    @property
    def start_task(self) -> Any:
        """Task that starts HAProxy."""
        return self._haproxy_start_task

    @property
    def reload_lock(self) -> asyncio.Lock:
        """Lock that Serve holds while it reloads HAProxy."""
        lock: asyncio.Lock = self._reload_lock
        return lock


def use_haproxy_manager(kind: type) -> None:
    """Make the controller in this process start managers of HAProxy of this class."""
    import ray

    controller.HAProxyManager = ray.remote(num_cpus=0)(kind)
