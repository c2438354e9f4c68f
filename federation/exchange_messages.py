"""Messages between the exchange processes of two nodes.

A parcel is what one producer node gives one consumer node for one step. The consumer asks, the
producer answers, so that nothing comes that the consumer has no room for. On the wire a message is
a multipart: one msgpack header [version, kind, job, generation, step, producer, consumer, fields of
the kind], at most 64 KiB, then raw little-endian frames where the kind has some. Whatever a peer
sends is checked here, before anything is made of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msd_client.contract.codec import pack, unpack
from msd_client.contract.errors import ProtocolError, VersionMismatchError

WIRE_VERSION = 2
HEADER_BYTES_MAX = 64 << 10
FRAME_BYTES_MIN = 64 << 10
FRAME_BYTES_MAX = 16 << 20
"""Of one data frame: above 32 MiB every received message is a mapping of its own, and dear."""
REQUEST_BYTES_MAX = 128 << 10
"""Of a frame that a consumer sends: it asks only."""
PARCEL_BYTES_MAX = 64 << 30
FRAGMENTS_MAX = 1 << 20
PARTS_MAX = 1 << 16
PULLED_FRAMES_MAX = 256
"""Frames that one message may ask for."""
TEXT_CHARS_MAX = 4096
NUMBER_MAX = (1 << 63) - 1
PART_ALIGN_BYTES = 64

Buffer = bytes | memoryview
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class ParcelKey(NamedTuple):
    """Names a parcel in the whole cluster; ordered by what is wanted first within a generation."""

    job: str
    generation: int
    step: int
    producer: str
    consumer: str


@dataclass(frozen=True)
class Want:
    """Consumer: tell the parcel's size once there is one."""

    key: ParcelKey


@dataclass(frozen=True)
class ParcelSize:
    """Producer: the parcel is there. The frames of a `ParcelTable` follow."""

    key: ParcelKey
    size_bytes: int
    frame_bytes: int
    """Of every data frame but the last."""
    layout: int
    """Digest of the table: frames of two layouts do not go together."""
    giver: int
    """Incarnation of the producer's process: another one has forgotten what it was asked for."""

    @property
    def frames_count(self) -> int:
        """Data frames of the parcel."""
        return -(-self.size_bytes // self.frame_bytes)

    def frame_span(self, frame: int) -> tuple[int, int]:
        """Return where a data frame begins and ends in the parcel."""
        begin = frame * self.frame_bytes
        return begin, min(begin + self.frame_bytes, self.size_bytes)


@dataclass(frozen=True)
class Pull:
    """Consumer: send these data frames, in this order."""

    key: ParcelKey
    layout: int
    frames: tuple[int, ...]


@dataclass(frozen=True)
class ParcelData:
    """Producer: one data frame; its bytes are the one frame that follows."""

    key: ParcelKey
    layout: int
    frame: int


@dataclass(frozen=True)
class Taken:
    """Consumer: the whole parcel is here, forget it."""

    key: ParcelKey


@dataclass(frozen=True)
class TakenNoted:
    """Producer: it is forgotten; need not be said again."""

    key: ParcelKey


@dataclass(frozen=True)
class Refused:
    """Producer: this parcel cannot be given, and why."""

    key: ParcelKey
    code: str
    reason: str


@dataclass(frozen=True)
class Ping:
    """Consumer: who asks, and is anybody there?"""

    node: str
    number: int


@dataclass(frozen=True)
class Pong:
    """Producer: yes."""

    node: str
    number: int
    giver: int
    data_port: int = 0
    """Where data frames may be had over plain TCP; 0: over ZeroMQ alone."""
    data_token: str = ""
    """By which the consumer is known there, hexadecimal."""


ExchangeMessage = Want | ParcelSize | Pull | ParcelData | Taken | TakenNoted | Refused | Ping | Pong
_KINDS: tuple[type[Any], ...] = (
    Want, ParcelSize, Pull, ParcelData, Taken, TakenNoted, Refused, Ping, Pong,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _KINDS}
_TYPES = {kind: tuple(str(field.type) for field in dataclasses.fields(kind)) for kind in _KINDS}
TABLE_FRAMES = 5
_FRAMES = {ParcelSize: TABLE_FRAMES, ParcelData: 1}
REQUESTS = (Want, Pull, Taken, Ping)
"""What a consumer sends; the others are answers."""


def encode_header(message: ExchangeMessage) -> bytes:
    """Return the first frame of a message."""
    kind = type(message)
    values: list[Any] = [WIRE_VERSION, _NUMBERS[kind]]
    for name in _FIELDS[kind]:
        value = getattr(message, name)
        if isinstance(value, ParcelKey):
            values += value
        else:
            values.append(value)
    return pack(values)


def decode_message(frames: Sequence[Buffer]) -> ExchangeMessage:
    """Return the message of a multipart; its further frames are counted, not read.

    Raises:
        VersionMismatchError: The peer speaks another version.
        ProtocolError: It is no message: too large, of no known kind, a field is missing, of the
            wrong type or out of range, or frames are missing.
    """
    if not frames:
        raise ProtocolError("an exchange message without a frame")
    values = unpack(frames[0], bytes_max=HEADER_BYTES_MAX)
    if not isinstance(values, list) or len(values) < 2:
        raise ProtocolError("an exchange message begins with [version, kind]")
    version, number, *fields = values
    if type(version) is not int or version != WIRE_VERSION:
        raise VersionMismatchError(
            f"a peer's exchange speaks version {version!r}, this one {WIRE_VERSION}: "
            "run one release on all nodes"
        )
    if type(number) is not int or not 0 <= number < len(_KINDS):
        raise ProtocolError(
            f"exchange message of kind {number!r}, known are 0 to {len(_KINDS) - 1}"
        )
    kind = _KINDS[number]
    wanted = 1 + _FRAMES.get(kind, 0)
    if len(frames) != wanted:
        raise ProtocolError(f"{kind.__name__} in {len(frames)} frames, it has {wanted}")
    message: ExchangeMessage = kind(*_decode_fields(kind, fields))
    if isinstance(message, ParcelSize):
        _check_size(message)
    return message


def encode_data(data: ParcelData) -> bytes:
    """Return the header of a data frame, as `encode_header` does: one goes with every two MiB."""
    return pack([WIRE_VERSION, _NUMBERS[ParcelData], *data.key, data.layout, data.frame])


def decode_data(header: bytes) -> ParcelData:
    """Return the data frame that a header announces, as `decode_message` does.

    Raises:
        VersionMismatchError: The peer speaks another version.
        ProtocolError: It announces none.
    """
    values = unpack(header, bytes_max=HEADER_BYTES_MAX)
    if isinstance(values, list) and len(values) == 9:
        version, number, job, generation, step, producer, consumer, layout, frame = values
        texts = (job, producer, consumer)
        numbers = (generation, step, layout, frame)
        if (
            type(version) is type(number) is int
            and (version, number) == (WIRE_VERSION, _NUMBERS[ParcelData])
            and all(type(it) is str and len(it) <= TEXT_CHARS_MAX for it in texts)
            and all(type(it) is int and 0 <= it <= NUMBER_MAX for it in numbers)
        ):
            return ParcelData(ParcelKey(job, generation, step, producer, consumer), layout, frame)
    message = decode_message([header, b""])  # it says what is wrong
    if not isinstance(message, ParcelData):
        raise ProtocolError(f"a {type(message).__name__} where data frames come")
    return message


def _decode_fields(kind: type[Any], values: list[Any]) -> list[Any]:
    types = _TYPES[kind]
    count = sum(5 if name == "ParcelKey" else 1 for name in types)
    if len(values) != count:
        raise ProtocolError(f"{kind.__name__} with {len(values)} fields, it has {count}")
    decoded: list[Any] = []
    at = 0
    for type_name, name in zip(types, _FIELDS[kind], strict=True):
        if type_name == "ParcelKey":
            job, generation, step, producer, consumer = values[at : at + 5]
            decoded.append(
                ParcelKey(
                    _text(kind, "job", job),
                    _number(kind, "generation", generation),
                    _number(kind, "step", step),
                    _text(kind, "producer", producer),
                    _text(kind, "consumer", consumer),
                )
            )
            at += 5
            continue
        value = values[at]
        at += 1
        if type_name == "int":
            decoded.append(_number(kind, name, value))
        elif type_name == "str":
            decoded.append(_text(kind, name, value))
        else:
            decoded.append(_numbers(kind, name, value))
    return decoded


def _number(kind: type[Any], name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise ProtocolError(f"{kind.__name__}.{name} is {value!r:.80}, expected 0 to {NUMBER_MAX}")
    return value


def _text(kind: type[Any], name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise ProtocolError(
            f"{kind.__name__}.{name} is {value!r:.80}, expected a text of at most {TEXT_CHARS_MAX}"
        )
    return value


def _numbers(kind: type[Any], name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= PULLED_FRAMES_MAX:
        raise ProtocolError(
            f"{kind.__name__}.{name} is {value!r:.80}, expected 1 to {PULLED_FRAMES_MAX} numbers"
        )
    return tuple(_number(kind, name, item) for item in value)


def _check_size(size: ParcelSize) -> None:
    if not 1 <= size.size_bytes <= PARCEL_BYTES_MAX:
        raise ProtocolError(f"parcel of {size.size_bytes} bytes, the limit is {PARCEL_BYTES_MAX}")
    if not FRAME_BYTES_MIN <= size.frame_bytes <= FRAME_BYTES_MAX:
        raise ProtocolError(
            f"data frames of {size.frame_bytes} bytes, expected {FRAME_BYTES_MIN} to {FRAME_BYTES_MAX}"
        )


@dataclass(frozen=True, eq=False)
class ParcelTable:
    """What a parcel holds: chunks one after the other, and the fragment that each record is."""

    parts: Int64
    """(source, first byte in the parcel, bytes, records) of each chunk. Shape (parts, 4)."""
    block_key: Int64
    """Of each fragment, records of the chunks in turn. Shape (fragments,), as all that follow."""
    index: Int32
    offset: Int32
    """First token of the fragment in its record."""
    length: Int32

    def encode(self) -> list[bytes]:
        """Return the frames."""
        return [
            self.parts.astype("<i8").tobytes(),
            self.block_key.astype("<i8").tobytes(),
            *(column.astype("<i4").tobytes() for column in (self.index, self.offset, self.length)),
        ]

    @classmethod
    def decode(cls, frames: Sequence[Buffer], size_bytes: int) -> ParcelTable:
        """Return the table of a parcel of `size_bytes` bytes.

        Raises:
            ProtocolError: A column has another length, or the parts do not cover the parcel.
        """
        parts_frame, keys_frame, *rest = frames
        if len(parts_frame) % 32 or len(keys_frame) % 8:
            raise ProtocolError("the columns of a parcel's table are cut short")
        parts_count, fragments = len(parts_frame) // 32, len(keys_frame) // 8
        if not 1 <= parts_count <= PARTS_MAX or not 1 <= fragments <= FRAGMENTS_MAX:
            raise ProtocolError(
                f"a parcel of {parts_count} chunks and {fragments} fragments, "
                f"the limits are {PARTS_MAX} and {FRAGMENTS_MAX}"
            )
        if any(len(frame) != 4 * fragments for frame in rest):
            raise ProtocolError(f"a column of a parcel's table is not one of {fragments} fragments")
        # Copied: what follows lives as long as the parcel, a received frame must not.
        table = cls.of_frames([bytes(frame) for frame in frames])
        table._check(size_bytes)
        return table

    @classmethod
    def of_frames(cls, frames: Sequence[bytes]) -> ParcelTable:
        """Return the table of frames that were checked before."""
        parts, keys, *rest = frames
        return cls(
            np.frombuffer(parts, "<i8").reshape(-1, 4),
            np.frombuffer(keys, "<i8"),
            *(np.frombuffer(frame, "<i4") for frame in rest),
        )

    def _check(self, size_bytes: int) -> None:
        source, begin, used, records = self.parts.T
        ends = np.minimum(begin, PARCEL_BYTES_MAX) + np.clip(used, 0, PARCEL_BYTES_MAX)
        is_sound = (
            bool(((source >= 0) & (source < 1 << 31) & (used > 0) & (records > 0)).all())
            and int(begin[0]) == 0
            and not (begin % PART_ALIGN_BYTES).any()
            and bool((begin[1:] >= ends[:-1]).all())
            and bool((begin[1:] - ends[:-1] < PART_ALIGN_BYTES).all())
            and int(ends[-1]) == size_bytes
            and bool((records <= FRAGMENTS_MAX).all())
            and int(records.sum()) == len(self.index)
        )
        if not is_sound:
            raise ProtocolError(
                f"the {len(self.parts)} chunks of a parcel do not make up its {size_bytes} bytes "
                f"and {len(self.index)} fragments"
            )
        if (self.index < 0).any() or (self.offset < 0).any() or (self.length < 0).any():
            raise ProtocolError("a fragment of a parcel has an index, offset or length below 0")
