"""From a target to a TLS connection: addresses, the CONNECT proxy, certificates, and a deadline for each step."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from drain.apns.model import ApnsTarget, SessionLimits

STAGGER_SECONDS = 0.25
"""Head start of an address before the next one is tried as well (RFC 8305, Happy Eyeballs)."""
MAX_PROXY_ANSWER = 8192

P = TypeVar("P", bound=asyncio.Protocol)


class ConnectError(Exception):
    """No connection; the message says at which step and why. `config`: waiting will not mend it."""

    def __init__(self, message: str, *, config: bool = False) -> None:
        super().__init__(message)
        self.config = config


async def connect(target: ApnsTarget, limits: SessionLimits, factory: Callable[[], P]) -> P:
    """Connect `factory`'s protocol over TLS with ALPN h2. Raises ConnectError, and nothing else of the network.

    Takes at most connect_timeout + handshake_timeout. The name is looked up, and the certificate files are read,
    each time: both change during the life of a process.
    """
    loop = asyncio.get_running_loop()
    # In a thread: reading the system's CAs takes tens of milliseconds.
    context = await asyncio.to_thread(ssl_context, target)
    proxy = _Proxy.parse(target.proxy_url) if target.proxy_url else None
    host, port = (proxy.host, proxy.port) if proxy else (target.host, target.port)
    try:
        async with asyncio.timeout(limits.connect_timeout):
            sock = await _connect_tcp(host, port)
            if proxy:
                with _closed_unless_taken(sock):
                    await proxy.tunnel(sock, target.host, target.port)
    except TimeoutError:
        raise ConnectError(f"no connection to {host}:{port} in {limits.connect_timeout} s") from None
    except OSError as error:
        raise ConnectError(f"cannot connect to {host}:{port}: {error.strerror or error}") from error
    try:
        with _closed_unless_taken(sock):
            async with asyncio.timeout(limits.handshake_timeout):
                _, protocol = await loop.create_connection(
                    factory,
                    sock=sock,
                    ssl=context,
                    server_hostname=target.host,
                    ssl_handshake_timeout=limits.handshake_timeout,
                    ssl_shutdown_timeout=limits.close_timeout,
                )
    except TimeoutError:
        raise ConnectError(f"no TLS handshake with {target.host} in {limits.handshake_timeout} s") from None
    except ssl.SSLCertVerificationError as error:
        raise ConnectError(f"certificate of {target.host}: {error.verify_message}", config=True) from error
    except OSError as error:
        raise ConnectError(f"TLS with {target.host}: {describe(error)}", config=refused(error)) from error
    return protocol


@contextlib.contextmanager
def _closed_unless_taken(sock: socket.socket) -> Iterator[None]:
    # uvloop does not close a socket that was given to it when the handshake fails; closing twice is harmless.
    try:
        yield
    except BaseException:
        sock.close()
        raise


def ssl_context(target: ApnsTarget) -> ssl.SSLContext:
    """Verifying client context with ALPN h2. Raises ConnectError(config=True) that names the file."""
    try:
        context = ssl.create_default_context(cafile=target.ca_file)
    except OSError as error:
        raise ConnectError(f"CA file {target.ca_file}: {describe(error)}", config=True) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if target.certificate_file is not None:
        try:
            context.load_cert_chain(
                target.certificate_file, target.certificate_key_file, password=_no_password
            )
        except (OSError, ValueError) as error:
            raise ConnectError(
                f"client certificate {target.certificate_file}: {describe(error)}", config=True
            ) from error
    return context


def _no_password() -> str:
    # Without it OpenSSL asks on the terminal, and the daemon stands still.
    raise ValueError("the key is encrypted")


def describe(error: BaseException) -> str:
    """The cause without OpenSSL's source lines."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return str(error) or type(error).__name__


def refused(error: BaseException | None) -> bool:
    """Whether the peer said by a TLS alert that it does not take our certificate (or wants one)."""
    if not isinstance(error, ssl.SSLError):
        return False
    reason = (error.reason or "").upper()
    return "ALERT" in reason and any(
        word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")
    )


async def _connect_tcp(host: str, port: int) -> socket.socket:
    """The first address that answers; the next one is tried a moment later, without giving up those before."""
    waiting = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    attempts: set[asyncio.Task[socket.socket]] = set()
    failure: BaseException = OSError(f"no address for {host}")
    try:
        while waiting or attempts:
            if waiting:
                family, kind, protocol, _, address = waiting.pop(0)
                attempts.add(asyncio.create_task(_connect_address(family, kind, protocol, address)))
            done, _ = await asyncio.wait(
                attempts, timeout=STAGGER_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    attempts.discard(task)
                    return task.result()
                failure = error
            attempts -= done
        raise failure
    finally:
        for task in attempts:
            task.cancel()
        for result in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(result, socket.socket):
                result.close()


async def _connect_address(
    family: int, kind: int, protocol: int, address: tuple[object, ...]
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


class _Proxy:
    """An HTTP proxy that tunnels (RFC 9110, section 9.3.6), with or without basic authentication."""

    def __init__(self, host: str, port: int, authorization: str | None) -> None:
        self.host = host
        self.port = port
        self._authorization = authorization

    @classmethod
    def parse(cls, url: str) -> _Proxy:
        # No message quotes the URL: it may hold a password.
        try:
            parts = urlsplit(url)
            port = parts.port or 3128
        except ValueError:
            raise ConnectError("proxy URL: not a URL", config=True) from None
        if parts.scheme != "http" or not parts.hostname:
            raise ConnectError("proxy URL: must be http://[user:password@]host:port", config=True)
        authorization = None
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(user.encode()).decode()
        return cls(parts.hostname, port, authorization)

    async def tunnel(self, sock: socket.socket, host: str, port: int) -> None:
        """Ask for the tunnel on a connected socket. Raises ConnectError when the proxy says no."""
        loop = asyncio.get_running_loop()
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}"]
        if self._authorization:
            lines.append(f"Proxy-Authorization: {self._authorization}")
        await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode())
        # One byte too many would be the first of TLS; a proxy sends none before we do, so none is lost here.
        answer = b""
        while b"\r\n\r\n" not in answer:
            chunk = await loop.sock_recv(sock, 4096)
            answer += chunk
            if not chunk or len(answer) > MAX_PROXY_ANSWER:
                break
        status_line = answer.split(b"\r\n", 1)[0].decode("latin-1")
        status = 0
        with contextlib.suppress(ValueError, IndexError):
            status = int(status_line.split(" ")[1])
        if not 200 <= status < 300:
            raise ConnectError(
                f"proxy {self.host}:{self.port} answers {status_line[:80]!r}",
                config=status in (401, 403, 407),
            )
