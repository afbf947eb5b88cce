"""Puts a gateway together from its config, runs it, and takes it apart again."""

import asyncio
import gc
import ipaddress
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path

from gateway.access import AuditLog
from gateway.beside import Predecessor, Successor
from gateway.config import GatewayConfig, load_sessions, nameserver
from gateway.context import Gateway
from gateway.core.decide import HostFacts
from gateway.core.parked import Parked
from gateway.core.rules import RegistryList, RuleErrors, load_registries
from gateway.core.verdict import CloseReason
from gateway.credentials import ModelKey, ModelKeyError
from gateway.ending import Ending
from gateway.metrics import Metrics
from gateway.net.advice import Adviser
from gateway.net.decisions import Decisions
from gateway.net.descriptors import DescriptorBudget, raise_descriptor_limit
from gateway.net.dial import Dialer
from gateway.net.idle import IdleSweep
from gateway.net.linger import Lingering
from gateway.net.link import ContractServer
from gateway.net.listener import Listener
from gateway.net.metrics_server import MetricsServer
from gateway.net.model_proxy import ProviderError
from gateway.net.own_addresses import REFRESH_S, read_own_addresses
from gateway.net.parking import Parking
from gateway.net.pipes import PipePool
from gateway.net.poller import Poller
from gateway.net.progress import Progress
from gateway.net.resolve import Resolver
from gateway.net.services import Services
from gateway.net.taking_up import TakingUp, take_up_sessions
from gateway.net.tasks import Tasks
from gateway.net.waits import Waits
from gateway.registry import Registry
from gateway.runtime import fdstore
from gateway.runtime.addresses import TcpAddress, parse_address
from gateway.runtime.notify import feed_watchdog, notify, notify_reloading
from gateway.runtime.settings import SettingsError
from gateway.succession import Inheritance
from gateway.unfinished import Unfinished

log = logging.getLogger("gateway.app")


class StartError(Exception):
    """The gateway cannot start; the message is one sentence with the remedy."""


def read_registries(config: GatewayConfig) -> RegistryList:
    """Return the list of package registries: the built-in one, or the operator's. Raises StartError."""
    file = config.egress.registries_file
    try:
        text = Path(file).read_text() if file else (resources.files("gateway") / "data/registries.toml").read_text()
        return load_registries(text)
    except OSError as error:
        raise StartError(f"[egress] registries_file {file} cannot be read: {error.strerror}") from error
    except RuleErrors as error:
        raise StartError(f"[egress] registries_file {file}: {error}") from error


class App:
    """One gateway process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._registries = read_registries(config)
        try:
            self._key = ModelKey(config.model.api_key_file)
        except ModelKeyError as error:
            raise StartError(str(error)) from error
        # Without a contract socket the file is all there is to know, so the picture is whole at once.
        registry = Registry(
            self._registries,
            require_address=config.listen.proxy_protocol,
            ready=not config.listen.contract,
            max_waiters=config.limits.egress_waiters_per_session,
        )
        if (folder := config.audit.dir) and not os.access(folder, os.W_OK | os.X_OK):
            raise StartError(f"[audit] dir {folder} cannot be written; make it, with the gateway's user as its owner")
        audit = AuditLog(config.audit.dir, config.limits.max_egress_log_lines)
        metrics = Metrics()
        metrics.held = registry.held
        registry.on_gone = audit.forget
        try:
            self.gateway = Gateway(config, registry, audit, metrics, self._key)
        except (ModelKeyError, ProviderError) as error:
            audit.close()
            raise StartError(str(error)) from error
        if config.sessions.file:
            self._sessions = load_sessions(Path(config.sessions.file))
            for problem in self.gateway.registry.replace_all(self._sessions):
                raise StartError(f"{config.sessions.file}: {problem}")
        self._stopping = asyncio.Event()
        self._replacing = asyncio.Event()
        # What this process listens on, by name: sockets that nobody else keeps, and the service manager's.
        self._own_listeners: dict[str, socket.socket] = {}
        self._passed_listeners: dict[str, socket.socket] = {}
        self._following: asyncio.Task[None] | None = None

    def _facts(self) -> HostFacts:
        listen_settings = self._config.listen
        addresses = [parse_address(text) for text in (listen_settings.sandbox, listen_settings.metrics) if text]
        egress = self._config.egress
        return HostFacts(
            denied_networks=tuple(ipaddress.ip_network(text) for text in egress.denied_networks),
            trusted=tuple(entry.compiled() for entry in egress.trusted),
            own_addresses=read_own_addresses(),
            own_ports=frozenset(address.port for address in addresses if isinstance(address, TcpAddress)),
            allow_loopback=egress.allow_loopback,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises StartError, ListenError."""
        loop = asyncio.get_running_loop()
        # Before anything is taken up: a process that a signal ends on its way takes the tunnels along.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGUSR2, self._replacing.set)
        # What is taken up is judged by what was read before, so a SIGHUP that comes early is for later.
        early_hangup = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, early_hangup.set)
        config, limits, metrics = self._config, self._config.limits, self.gateway.metrics
        descriptors = DescriptorBudget.of_limit(raise_descriptor_limit())
        if config.egress.allow_loopback:
            log.warning("[egress] allow_loopback is on: for benchmarks and tests only")
        poller = Poller(loop)
        services = Services(
            loop=loop,
            poller=poller,
            gateway=self.gateway,
            resolver=Resolver(
                loop,
                timeout_s=limits.dns_timeout_ms / 1000,
                cache_names=limits.dns_cache_names,
                min_ttl_s=limits.dns_min_ttl_s,
                max_ttl_s=limits.dns_max_ttl_s,
                queries_per_session=limits.dns_queries_per_session,
                nameservers=[nameserver(text) for text in config.egress.nameservers],
                observe=metrics.resolve_seconds.observe,
            ),
            dialer=Dialer(
                loop,
                limits.egress_connect_timeout_ms / 1000,
                metrics.connect_seconds.observe,
                descriptors.upstream_below,
                poller,
            ),
            pipes=PipePool(),
            idle=IdleSweep(loop, limits.egress_idle_ms / 1000),
            lingering=Lingering(loop, poller),
            tasks=Tasks(),
            decisions=Decisions(self.gateway.registry),
            descriptors=descriptors,
            facts=self._facts(),
        )
        services.waits = Waits(services)
        self.gateway.model.start(poller)
        ports: list[Callable[[], Awaitable[None] | None]] = []
        predecessor = Predecessor.from_environment()
        inheritance = Inheritance(fdstore.passed(), predecessor)
        record = inheritance.record
        epoch = secrets.token_hex(8) if record is None else record.epoch
        try:
            # All that can fail at a start comes first: a gateway that runs beside this one goes on then as it was.
            sockets = self._listen(inheritance)
            inheritance.confirm()
            listener = Listener(services, sockets["sandbox"])
            ports.append(listener.close)
            if "metrics" in sockets:
                server = MetricsServer(self.gateway)
                await server.start(sockets["metrics"])
                ports.append(server.close)
            if record is not None:
                take_up_sessions(self.gateway.registry, record)
                if predecessor is not None:
                    self._follow(predecessor, record)
                TakingUp(services, listener, inheritance.descriptors).run(record)
                log.info("took up %d connections of the process before", record.connections)
                if config.sessions.file:
                    # What the file says now is in force, also for what was open before.
                    self.gateway.registry.replace_all(self._sessions)
            inheritance.close_rest()
            Unfinished(config.audit.dir).settle(self.gateway.audit, taken_up=record is not None)
            if "contract" in sockets:
                adviser = Adviser(services, self._registries)
                contract = ContractServer(self.gateway, epoch, adviser.answer)
                await contract.start(sockets["contract"])
                ports.append(contract.close)
            loop.add_signal_handler(signal.SIGHUP, self._reload, services)
            refresh = loop.create_task(self._keep_facts_current(services))
            # What was made until here lives as long as the process: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            listener.start()
            progress = Progress(poller)
            ports.append(progress.close)
            watchdog = loop.create_task(feed_watchdog(progress.prove))
            notify("READY=1")
            inheritance.announce()
            log.info("serving sandboxes on %s", config.listen.sandbox)
            if early_hangup.is_set():
                self._reload(services)
            ending = Ending(services, listener, Parking(services, listener, epoch), self._stopping)
            successor = await self._serve(ending)
            if successor is None:
                await ending.stop(self._own_listeners, predecessor)
            else:
                # The service manager listens to the next process only.
                watchdog.cancel()
                await _close(ports)
                await ending.drain_for(successor, predecessor)
            refresh.cancel()
            # Only now: draining is progress too.
            watchdog.cancel()
        finally:
            await _close(ports)
            for session in self.gateway.registry:
                session.close(CloseReason.SHUTDOWN)
            await services.tasks.close()
            await self.gateway.model.close()
            for part in (services.waits, services.dialer, services.resolver, services.idle, services.lingering):
                part.close()
            if self._following is not None:
                self._following.cancel()
            poller.close()
            services.pipes.close()
            self.gateway.audit.close()

    def _listen(self, inheritance: Inheritance) -> dict[str, socket.socket]:
        """Return what to listen on, by name. Raises ListenError."""
        places = self._config.listen
        sockets = {}
        for name, address in (("sandbox", places.sandbox), ("metrics", places.metrics), ("contract", places.contract)):
            if address:
                sockets[name], is_managers = inheritance.listening(name, parse_address(address))
                (self._passed_listeners if is_managers else self._own_listeners)[name] = sockets[name]
        return sockets

    async def _serve(self, ending: Ending) -> Successor | None:
        """Serve until the process is told to stop (None), or has been replaced."""
        while True:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._stopping, self._replacing)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._stopping.is_set():
                return None
            self._replacing.clear()
            successor = await ending.be_replaced(self._own_listeners, self._passed_listeners)
            if successor is not None:
                return successor

    def _follow(self, predecessor: Predecessor, record: Parked) -> None:
        """Count what the streams that stayed in the process before still use."""
        registry = self.gateway.registry
        registry.on_cut, registry.has_cut = predecessor.cut, predecessor.has_cut
        predecessor.begin(registry, record)
        self._following = asyncio.get_running_loop().create_task(predecessor.follow(registry))

    def _reload(self, services: Services) -> None:
        """SIGHUP: read sessions, key and nameservers anew; what cannot be read leaves the old in force."""
        notify_reloading()
        # Each by itself: a session that was taken out of the file must not stay because a key cannot be read.
        reads = (self._reload_sessions, self._key.reload, *(key.reload for key in self.gateway.model.keys.values()))
        for read in reads:
            try:
                read()
            except (ModelKeyError, SettingsError) as error:
                log.error("reload: %s", error)
        services.resolver.reload()
        self._renew_facts(services)
        notify("READY=1")
        log.info("reloaded")

    def _reload_sessions(self) -> None:
        """Put in force what the file says now. Raises SettingsError."""
        if file := self._config.sessions.file:
            for problem in self.gateway.registry.replace_all(load_sessions(Path(file))):
                log.error("%s: %s", file, problem)

    async def _keep_facts_current(self, services: Services) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._renew_facts(services)

    def _renew_facts(self, services: Services) -> None:
        try:
            facts = self._facts()
        except OSError as error:
            # The last known addresses stay refused.
            log.error("this host's addresses cannot be read: %s", error.strerror)
            return
        if facts != services.facts:
            services.facts = facts


async def _close(ports: list[Callable[[], Awaitable[None] | None]]) -> None:
    """Close what serves, each once."""
    while ports:
        result = ports.pop(0)()
        if result is not None:
            await result
