"""Bytes that are not quite HTTP: broken heads, chunks, lengths, pipelines and half requests."""

import random
from collections.abc import Callable

from tests.campaigns.fuzz.case import Kind, Leave, WireCase
from tests.campaigns.fuzz.grow import hostile

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
ROUTES = (b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/tokenize", b"/health")
NAMES = (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade")
MAX_HEAD_BYTES = 300_000  # picked: above every limit of a head
Builder = Callable[[bytes, random.Random], bytes]


def raw_case(number: int, noise: random.Random, key: str) -> WireCase:
    """Return bytes to send in pieces over a connection of their own."""
    builder = noise.choice(BUILDERS)
    data = builder(key.encode(), noise)
    if noise.random() < 0.2:
        data = hostile.broken(data, noise)
    leave = Leave.NEVER if noise.random() < 0.7 else Leave.IN_REPLY
    return WireCase(Kind.RAW, number, pieces=_pieces(data, noise), leave=leave)


def _pieces(data: bytes, noise: random.Random) -> tuple[bytes, ...]:
    if len(data) < 2 or noise.random() < 0.5:
        return (data,)
    cuts = sorted(noise.randrange(1, len(data)) for _ in range(noise.randrange(1, 4)))
    starts, stops = [0, *cuts], [*cuts, len(data)]
    return tuple(data[start:stop] for start, stop in zip(starts, stops, strict=True))


def _head(key: bytes, noise: random.Random, *more: bytes, method: bytes = b"POST") -> bytes:
    line = b"%s %s HTTP/1.1\r\n" % (method, noise.choice(ROUTES))
    headers = (b"host: localhost", b"authorization: Bearer " + key, *more)
    return line + b"".join(each + b"\r\n" for each in headers) + b"\r\n"


def _json_head(key: bytes, noise: random.Random, *more: bytes) -> bytes:
    return _head(key, noise, b"content-type: application/json", *more)


def _request_line(key: bytes, noise: random.Random) -> bytes:
    line = noise.choice(
        (
            *(
                b"GET",
                b"GET /",
                b"GET / HTTP/0.9",
                b"GET / HTTP/1.0",
                b"GET / HTTP/2.0",
                b"\0" * 20,
            ),
            *(b"GET  / HTTP/1.1", b"get /health HTTP/1.1", b"GET http://x/health HTTP/1.1", b""),
            *(
                b"GET /%zz HTTP/1.1",
                b"GET /\xff HTTP/1.1",
                b"GET /../../etc HTTP/1.1",
                b"PRI * HTTP/2.0",
            ),
            *(
                b"GET /?" + b"a" * 20_000 + b" HTTP/1.1",
                b"CONNECT x:1 HTTP/1.1",
                b"OPTIONS * HTTP/1.1",
            ),
            *(
                b"A" * 5_000 + b" / HTTP/1.1",
                b"GET /\x00 HTTP/1.1",
                b"\x16\x03\x01\x02\x00\x01\x00",
            ),
            *(b"GET /health#x HTTP/1.1", b"GET //health HTTP/1.1", b"GET /health;a HTTP/1.1"),
        )
    )
    return line + b"\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n\r\n"


def _header_lines(key: bytes, noise: random.Random) -> bytes:
    lines = noise.choice(
        (
            *(
                (b": empty",),
                (b"no colon",),
                (b"a b: c",),
                (b" folded: x",),
                (b"x: \x00",),
                (b"x: \xff",),
            ),
            *((b"host: a", b"host: b"), (b"x: " + b"y" * 20_000,), (b"x\xe9: 1",), (b"x:\x0b1",)),
            *(tuple(b"h%d: v" % n for n in range(noise.choice((90, 150, 3_000)))),),
            *((b"x: " + b"z" * noise.choice((9_000, 70_000, MAX_HEAD_BYTES)),),),
            *((b"expect: 100-continue",), (b"upgrade: websocket", b"connection: upgrade")),
            *(
                (b"upgrade: h2c", b"connection: Upgrade, HTTP2-Settings"),
                (b"content-type: " + b";" * 999,),
            ),
        )
    )
    return _json_head(key, noise, *lines, b"content-length: %d" % len(CHAT)) + CHAT


def _host_ports(key: bytes, noise: random.Random) -> bytes:
    """Return a request whose host and origin have ports that are no ports."""
    digits = noise.choice((b"9", b"0", b"\xb2", b"-1", b"0x1f", b"1_0"))
    port = digits * noise.choice((0, 1, 6, 400, 5_000))
    name = noise.choice((b"127.0.0.1", b"localhost", b"[::1]", b"[", b""))
    site = (b"host: %s:%s" % (name, port), b"origin: http://%s:%s" % (name, port))
    lines = (*site, b"authorization: Bearer " + key, b"content-type: application/json")
    head = b"POST %s HTTP/1.1\r\n" % noise.choice(ROUTES)
    head += b"".join(line + b"\r\n" for line in lines)
    return head + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT


def _lengths(key: bytes, noise: random.Random) -> bytes:
    length = noise.choice(
        (
            *(
                b"0",
                b"1",
                b"-1",
                b"+5",
                b"0x10",
                b"1e3",
                b"5, 5",
                b"5, 6",
                b" ",
                b"9" * 30,
                b"\xb2",
            ),
            *(
                str(2**31).encode(),
                str(2**63).encode(),
                b"%d" % (len(CHAT) + 1),
                b"%d" % (len(CHAT) - 1),
            ),
        )
    )
    again = (b"content-length: %d" % len(CHAT),) if noise.random() < 0.3 else ()
    return _json_head(key, noise, b"content-length: " + length, *again) + CHAT


def _chunks(key: bytes, noise: random.Random) -> bytes:
    coding = noise.choice(
        (b"chunked", b"chunked", b"gzip, chunked", b"chunked, chunked", b"xchunked")
    )
    also = (b"content-length: 5",) if noise.random() < 0.2 else ()
    head = _json_head(key, noise, b"transfer-encoding: " + coding, *also)
    whole = b"%x\r\n%s\r\n" % (len(CHAT), CHAT)
    bad = noise.choice(
        (
            *(
                b"zz\r\nx\r\n",
                b"-1\r\n",
                b"ffffffffffffffff\r\nx",
                b"5\r\nabc",
                b"5;ext=\x00\r\nabcde\r\n",
            ),
            *(
                b"1\r\n{\r\n" * noise.choice((3, 2_000)),
                b"0\r\n",
                b"\r\n\r\n",
                b"5" * 5_000 + b"\r\n",
            ),
            *(
                b"1;" + b"a" * 30_000 + b"\r\n{\r\n",
                b"5\nabcde\n",
                whole[: noise.randrange(len(whole))],
            ),
        )
    )
    end = noise.choice(
        (b"0\r\n\r\n", b"0\r\ntrailer: x\r\n\r\n", b"0\r\n" + b"t: x\r\n" * 999 + b"\r\n")
    )
    return head + (whole if noise.random() < 0.3 else bad) + end


def _pipeline(key: bytes, noise: random.Random) -> bytes:
    whole = _json_head(key, noise, b"content-length: %d" % len(CHAT)) + CHAT
    get = _head(key, noise, method=b"GET")
    return b"".join(noise.choice((whole, get, get, b"\r\n")) for _ in range(noise.randrange(2, 12)))


def _half(key: bytes, noise: random.Random) -> bytes:
    whole = _json_head(key, noise, b"content-length: %d" % (len(CHAT) + 1_000)) + CHAT
    return whole[: noise.randrange(1, len(whole))]


def _smuggled(key: bytes, noise: random.Random) -> bytes:
    inner = _head(b"wrong", noise, method=b"DELETE")
    both = (b"content-length: 4", b"transfer-encoding: chunked")
    return _json_head(key, noise, *noise.sample(both, 2)) + b"0\r\n\r\n" + inner


def _rubbish(_key: bytes, noise: random.Random) -> bytes:
    return noise.randbytes(noise.choice((1, 10, 100, 5_000)))


BUILDERS: tuple[Builder, ...] = (
    *(_request_line, _header_lines, _header_lines, _lengths, _chunks, _pipeline, _half, _smuggled),
    *(_host_ports, _rubbish),
)
