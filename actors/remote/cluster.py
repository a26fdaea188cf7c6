"""Joining a Ray cluster: authentication, what is there, and a place for each device."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from layerzero._util import log
from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.remote.ray_actor import DeviceSpec, actor_class
from layerzero.actors.remote.ray_device import RayDevice
from layerzero.actors.remote.sending import await_ref
from layerzero.actors.remote.stores import open_store
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.settings import Settings

_CONNECT_S = 10.0
_SHARED_S = 60.0
_PARTS = 10_000  # of a GPU, which Ray counts in
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class Cluster:
    """A joined cluster: its placement group and the devices placed in it. `leave` undoes what joining did."""

    def __init__(self, settings: Settings, owns_ray: bool) -> None:
        self.name = uuid.uuid4().hex[:8]
        self._settings = settings
        self._owns_ray = owns_ray  # we called ray.init, so we shut it down
        self._group: Any = None
        self._store: Any = None
        self.devices: list[RayDevice] = []

    async def place(self, opener: str) -> list[RayDevice]:
        """Reserve a place for every device and open one in each.

        Raises: ConfigurationError: the places do not become free in time; the message says what is there.
            DeviceLostError: a device did not start.
        """
        import ray

        bundles = self._bundles()
        self._group = await self._reserve(bundles)
        secret = secrets.token_bytes(32)
        self._store, store = open_store(ray.util.get_node_ip_address(), self._settings.placement_timeout_s)
        shared_s = self._settings.shared_choices_s
        settings = self._settings.replace(
            cluster=None, cluster_devices=None, shared_choices_s=_SHARED_S if shared_s is None else shared_s
        )
        for index, bundle in enumerate(bundles):
            name = f"{'gpu' if 'GPU' in bundle else 'cpu'}-{index}"
            spec = DeviceSpec(
                name=name, pool=self.name, settings=settings, opener=opener, secret=secret, store=store
            )
            self.devices.append(self._device(spec, bundle, index))
        limit = self._settings.placement_timeout_s
        opened = [asyncio.ensure_future(device.open(limit)) for device in self.devices]
        try:
            await asyncio.gather(*opened)
        except BaseException:
            for task in opened:
                task.cancel()
            await asyncio.gather(*opened, return_exceptions=True)
            await self.leave()
            raise
        return self.devices

    def _bundles(self) -> list[dict[str, float]]:
        """One GPU each, or an equal part of one, or one CPU on each node where the cluster has no GPU."""
        import ray

        total = ray.cluster_resources()
        per_gpu = self._settings.cluster_devices_per_gpu
        gpus = int(total.get("GPU", 0)) * per_gpu
        bundle, count = {"GPU": int(_PARTS / per_gpu) / _PARTS}, gpus
        if not gpus:
            alive = sum(node["Alive"] for node in ray.nodes())
            bundle, count = {"CPU": 1.0}, max(1, alive)
        count_set = self._settings.cluster_devices
        return [bundle] * (count if count_set is None else count_set)

    async def _reserve(self, bundles: list[dict[str, float]]) -> Any:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group(bundles, strategy="SPREAD", name=f"layerzero-{self.name}")
        limit = self._settings.placement_timeout_s
        try:
            await asyncio.wait_for(await_ref(group.ready()), limit)
        except TimeoutError:
            free, total = ray.available_resources(), ray.cluster_resources()
            remove_placement_group(group)
            raise ConfigurationError(
                f"the cluster gave no place for {_sum(bundles)} within placement_timeout_s={limit}: it has "
                f"{_plain(total)}, of which free {_plain(free)}; add nodes, free some, or ask for less with "
                "cluster_devices",
                field="cluster_devices",
            ) from None
        return group

    def _device(self, spec: DeviceSpec, bundle: Mapping[str, float], index: int) -> RayDevice:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = actor_class().options(
            name=f"layerzero-{self.name}-{spec.name}",
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        )
        node = ray.get_runtime_context().get_node_id()
        return RayDevice(spec, actor.remote, node=node)

    async def leave(self) -> None:
        """Close every device, give the places back, and leave Ray where we joined it."""
        import ray
        from ray.util.placement_group import remove_placement_group

        await asyncio.gather(*(device.close() for device in self.devices))
        self._store = None
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


class _RayClient:
    """Ray's client of this process, which a forked child must not call: its threads and locks stay behind.

    A child that only collects an old handle would wait forever for a lock that one of those threads held.
    """

    def __init__(self) -> None:
        self._parents: Any = None

    def after_fork(self) -> None:
        """Let Ray's destructors find no client; it is kept itself, for its end would be a call too."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            worker = ray._private.worker.global_worker
            self._parents, worker.core_worker = worker.core_worker, None
            worker.set_is_connected(False)


_CLIENT = _RayClient()
renew_after_fork(_CLIENT)


def join(settings: Settings) -> Cluster:
    """Join the cluster that `Settings.cluster` names, or the one that this process is in already.

    "auto" finds a cluster of this machine, "local" starts one for this process alone.

    Raises: BackendNotAvailableError: ray is not installed. ConfigurationError: there is no such cluster, or
        it is reachable from other machines and asks for no token.
    """
    address = settings.cluster
    assert address is not None
    if address == "local" and "ray" not in sys.modules:
        _ensure_token()  # Ray reads its mode when it is imported
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise BackendNotAvailableError(
            "cluster needs ray: pip install 'layerzero-runtime[ray]'", backend="ray"
        ) from error
    if ray.is_initialized():
        return Cluster(settings, owns_ray=False)
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        _check_listening(address)
        with _own_sigterm():
            ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise ConfigurationError(
            f"cluster={address!r} cannot be joined: {error}; start one with `ray start --head` and see that "
            f"this process has its token ({_TOKEN} or {_TOKEN_PATH})",
            field="cluster",
        ) from error
    try:
        _require_authentication(ray.util.get_node_ip_address())
    except ConfigurationError:
        ray.shutdown()
        raise
    return Cluster(settings, owns_ray=True)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the program's handler of SIGTERM, as of a server that drains: Ray's own exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_listening(address: str) -> None:
    """Ray itself would wait for minutes. Raises: OSError: no process listens at host:port."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        return  # auto, local, a client's URL
    hosts = [host.strip("[]")]
    if hosts[0] in ("localhost", "127.0.0.1", "::1"):
        hosts.append(get_node_ip_address())  # where Ray looks instead
    for number, each in enumerate(hosts, 1):
        try:
            socket.create_connection((each, int(port)), _CONNECT_S).close()
            return
        except OSError:
            if number == len(hosts):
                raise


def _ensure_token() -> None:
    """Any process that reaches a port of Ray runs code as us: a cluster that we start requires a token."""
    mode = os.environ.setdefault(_MODE, "token")
    if mode == "token" and not (os.environ.get(_TOKEN) or os.environ.get(_TOKEN_PATH)):
        os.environ[_TOKEN] = secrets.token_hex(32)


def _require_authentication(host: str) -> None:
    mode = os.environ.get(_MODE, "")
    if mode == "token" or ipaddress.ip_address(host).is_loopback:
        return
    if mode == "disabled":
        log.warning("cluster.unauthenticated", host=host)
        return
    raise ConfigurationError(
        f"the cluster at {host} asks for no token, so any process that reaches its ports runs code in it: "
        f"make one with `ray get-auth-token --generate` and set {_MODE}=token, for Ray and before this "
        f"process imports ray; {_MODE}=disabled takes the risk",
        field="cluster",
    )


def _sum(bundles: list[dict[str, float]]) -> str:
    ((kind, share),) = bundles[0].items()
    return f"{len(bundles)} x {share:g} {kind}"


def _plain(resources: Mapping[str, float]) -> str:
    return f"{resources.get('GPU', 0):g} GPU and {resources.get('CPU', 0):g} CPU"
