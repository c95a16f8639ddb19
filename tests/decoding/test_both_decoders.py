"""The two implementations over frames that no server sends: same values, same errors, same bytes.

`CASES` frames are made out of the vectors from fixed seeds, and decoded without and with a decoder;
then streams whose messages come in any order. PGOUTPUT_FAST_DIFFERENTIAL multiplies the cases.
"""

from __future__ import annotations

import os
import pickle
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.frames import comparison
from support.frames.comparison import Escaped, differences, fingerprint, observe_decode
from support.frames.mutations import length_places, mutated, stream_frame
from support.frames.vector_files import read_vectors
from support.nightly import nightly

import pgoutput_fast as pf

TIMES = int(os.environ.get("PGOUTPUT_FAST_DIFFERENTIAL", "1"))
SEEDS = 10 * TIMES
CASES = 6_000
"""Mutated frames of each seed; every one is decoded twice, alone and after its relations."""
SEQUENCES, STEPS = 60, 40
"""Streams of each seed, and the frames of each."""

POLICIES = (
    None,
    pf.Policies(infinity="null", out_of_range="clamp", json="parse"),
    pf.Policies(infinity="clamp", out_of_range="null", special_values="null"),
    pf.Policies(infinity="text", out_of_range="text", special_values="text"),
)
VECTORS = [vector for vector in read_vectors() if len(vector["frame"]) < 4000]
FRAMES = [vector["frame"] for vector in VECTORS if vector["frame"]]


class Compared:
    """One decoder of each implementation, fed the same frames."""

    def __init__(
        self,
        first: ModuleType,
        second: ModuleType,
        encoding: str = "utf-8",
        policies: pf.Policies | None = None,
    ) -> None:
        self.decoders = [
            module.Decoder(policies=policies, encoding=encoding) for module in (first, second)
        ]

    def decode(self, frame: bytes) -> list[str]:
        """Where the two differ on the next frame; after an error, neither may have changed."""
        before = fingerprint(self.decoders[0])
        seen = [observe_decode(decoder.decode, frame) for decoder in self.decoders]
        after = [fingerprint(decoder) for decoder in self.decoders]
        found = differences(*seen)
        if after[0] != after[1]:
            found.append("the decoders' states differ afterwards")
        if seen[0][0][0] == "refused" and after[0] != before:
            found.append("the decoder changed although it refused the frame")
        return found


def compare_frame(
    first: ModuleType, second: ModuleType, frame: bytes, in_stream: bool
) -> list[str]:
    return differences(
        observe_decode(first.decode, frame, in_stream),
        observe_decode(second.decode, frame, in_stream),
    )


def context(frame: bytes, vector: dict[str, Any], found: list[str]) -> str:
    return f"{frame.hex()} (from {vector['id']}, in_stream={vector['in_stream']}): {found}"


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, SEEDS))])
def test_mutated_frames(both: tuple[ModuleType, ModuleType], seed: int) -> None:
    chance = random.Random(seed)
    cases = 0
    outcomes = set()
    while cases < CASES:
        vector = chance.choice(VECTORS)
        encoding = vector.get("encoding", "utf-8")
        decoders = Compared(*both, encoding=encoding, policies=chance.choice(POLICIES))
        for frame in vector["before"]:
            assert decoders.decode(frame) == []
        places = length_places(vector)
        for _ in range(8):
            frame = mutated(chance, vector["frame"], FRAMES, places)
            in_stream = vector["in_stream"] ^ (chance.random() < 0.1)
            found = compare_frame(*both, frame, in_stream)
            assert not found, context(frame, vector, found)
            found = decoders.decode(frame)
            assert not found, context(frame, vector, found)
            seen = observe_decode(both[0].decode, frame, in_stream)[0]
            outcomes.add(seen[1][1] if seen[0] == "refused" else seen[1])
            cases += 1
    # mutations that only ever made the same error would test nothing
    assert outcomes >= {
        "truncated", "trailing_bytes", "bad_marker", "bad_column_kind", "bad_length", "bad_count",
        "unterminated_string", "unknown_tag", "Insert", "Update", "Relation",
    }  # fmt: skip


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, SEEDS))])
def test_streams_in_any_order(both: tuple[ModuleType, ModuleType], seed: int) -> None:
    chance = random.Random(1000 + seed)
    outcomes = set()
    for _ in range(SEQUENCES):
        compared = Compared(*both)
        frames = []
        for _ in range(STEPS):
            decoders = compared.decoders
            frame = stream_frame(chance, decoders[0].state.open_xid)
            frames.append(frame.hex())
            if frame == b"reset":
                for decoder in decoders:
                    decoder.reset()
                continue
            if chance.random() < 0.1:
                frame = mutated(chance, frame, FRAMES, []) if frame else frame
                frames[-1] = frame.hex()
            found = compared.decode(frame)
            assert not found, (frames, found)
            if chance.random() < 0.02:  # on another worker
                compared.decoders = [
                    decoder_of(module, pickle.loads(pickle.dumps(decoder.state)))
                    for module, decoder in zip(both, decoders, strict=True)
                ]
            seen = observe_decode(both[0].decode, frame)[0]
            outcomes.add(seen[0])
            relations = [repr(dict(decoder.relations)) for decoder in compared.decoders]
            assert relations[0] == relations[1], frames
    assert outcomes == {"class", "refused"}


def decoder_of(module: ModuleType, state: Any) -> Any:
    """A decoder of this very implementation that goes on from `state`."""
    return module.decoder_of(state)


@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_random_bytes(both: tuple[ModuleType, ModuleType], seed: int) -> None:
    """Every tag with bytes behind it that mean nothing."""
    chance = random.Random(2000 + seed)
    for case in range(2_000):
        tag = b"BCORYIUDTMSEcAbPKrp"[case % 19]
        length = chance.choice((0, 1, 4, 8, 20, 25, 26, 40))
        frame = bytes([tag]) + chance.randbytes(length)
        for in_stream in (False, True):
            found = compare_frame(*both, frame, in_stream)
            assert not found, (frame.hex(), in_stream, found)


def test_every_cut_and_every_byte(both: tuple[ModuleType, ModuleType]) -> None:
    """Of one frame of each class: cut at every byte, and every byte once with each bit flipped."""
    shortest: dict[tuple[str, bool], dict[str, Any]] = {}
    for vector in VECTORS:
        if "class" in vector and len(vector["frame"]) > 12:
            key = (vector["class"], vector["in_stream"])
            if key not in shortest or len(vector["frame"]) < len(shortest[key]["frame"]):
                shortest[key] = vector
    for vector in shortest.values():
        frame = vector["frame"]
        changed = [frame[:length] for length in range(len(frame))]
        for at in range(len(frame)):
            changed += [
                frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :] for bit in range(8)
            ]
        for bad in changed:
            found = compare_frame(*both, bad, vector["in_stream"])
            assert not found, context(bad, vector, found)


# --- the comparison itself ----------------------------------------------------------------------


class Fake:
    """An implementation whose messages differ from the real one's in one planted way."""

    def __init__(self, real: ModuleType, plant: str) -> None:
        self.real = real
        self.plant = plant

    def decode(self, frame: bytes, in_stream: bool = False) -> Any:
        try:
            message = self.real.decode(frame, in_stream)
        except pf.DecodeError as error:
            planted = {
                "code": ("truncated", error.offset, error.tag, str(error.args[0])),
                "offset": (error.code, error.offset + 1, error.tag, str(error.args[0])),
                "tag": (error.code, error.offset, "?", str(error.args[0])),
                "sentence": (error.code, error.offset, error.tag, error.args[0] + "?"),
            }
            if self.plant in planted:
                code, offset, tag, sentence = planted[self.plant]
                raise pf.DecodeError(sentence, code=code, offset=offset, tag=tag) from None
            if self.plant == "escape":
                raise IndexError("index out of range") from None
            raise
        if self.plant == "accept":
            return message
        return Planted(message, self.plant)


class Planted:
    """A message, or a tuple of one, with a planted difference."""

    def __init__(self, real: Any, plant: str) -> None:
        self._real, self._plant = real, plant
        type(self).__name__ = type(real).__name__

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name == self._plant:
            return not value if isinstance(value, bool) else value + value
        if name == "xid" and self._plant == "type":
            return float(value)
        if name in ("old", "new") and value is not None:
            return Planted(value, self._plant)
        if name in ("kind", "raw", "text") and self._plant == f"{name}()":
            return lambda i: value(i) and value(i) + value(i)
        if name in ("raws", "texts") and self._plant == f"{name}()":
            return lambda: value()[:-1]
        return value

    def __len__(self) -> int:
        return len(self._real)

    def __repr__(self) -> str:
        return repr(self._real) + " " * (self._plant == "repr")

    def __hash__(self) -> int:
        return hash(self._real) + (self._plant == "hash")

    def __iter__(self) -> Any:
        return iter(self._real)

    def __getitem__(self, key: Any) -> Any:
        return self._real[key]


GOOD = bytes.fromhex("490000000a00004001 4e0001 7400000001 31".replace(" ", ""))
BAD = bytes.fromhex("490000000a00004001 4e0001 7800000001 31".replace(" ", ""))


@pytest.mark.parametrize(
    ("plant", "part"),
    [
        ("repr", "repr"),
        ("hash", "hash"),
        ("xid", "xid"),
        ("type", "xid"),
        ("relation_id", "relation_id"),
        ("frame", "frame"),
        ("in_stream", "in_stream"),
        ("kind()", "new.kinds"),
        ("raw()", "new.raw(0)"),
        ("text()", "new.text(0)"),
        ("raws()", "new.raws"),
        ("texts()", "new.texts"),
    ],
)
def test_a_planted_difference_in_a_message_is_found(
    impl: ModuleType, plant: str, part: str
) -> None:
    assert compare_frame(impl, impl, GOOD, True) == []
    found = compare_frame(impl, Fake(impl, plant), GOOD, True)  # type: ignore[arg-type]
    assert any(sentence.startswith(f"{part}: ") for sentence in found), found


@pytest.mark.parametrize("plant", ["code", "offset", "tag", "sentence"])
def test_a_planted_difference_in_an_error_is_found(impl: ModuleType, plant: str) -> None:
    assert compare_frame(impl, impl, BAD, True) == []
    found = compare_frame(impl, Fake(impl, plant), BAD, True)  # type: ignore[arg-type]
    assert any(sentence.startswith("refused: ") for sentence in found), found


def test_another_exception_is_found(impl: ModuleType) -> None:
    with pytest.raises(Escaped, match="IndexError"):
        compare_frame(impl, Fake(impl, "escape"), BAD, True)  # type: ignore[arg-type]


def test_an_accepted_frame_that_the_other_refuses_is_found(impl: ModuleType) -> None:
    lenient = SimpleNamespace(decode=lambda frame, in_stream: impl.decode(GOOD, in_stream))
    assert compare_frame(impl, lenient, BAD, True)  # type: ignore[arg-type]


def test_a_state_that_changed_is_found(impl: ModuleType) -> None:
    compared = Compared(impl, impl)
    assert compared.decode(b"S\0\0\0\1\1") == []
    compared.decoders[1].state.row += 1
    assert compared.decode(b"?") == ["the decoders' states differ afterwards"]


def test_the_types_of_values_are_compared() -> None:
    assert comparison.types_of((1, True, [1.0], {"a": None})) == (
        "tuple", "int", "bool", ("list", "float"), ("dict", "NoneType"),
    )  # fmt: skip
