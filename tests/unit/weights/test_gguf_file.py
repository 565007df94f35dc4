"""The GGUF head reader against the gguf package's writer and reader, and against broken files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import OstinatoError, WeightError
from ostinato.weights.gguf_file import GGML_TYPES, UNSUPPORTED_TYPES, read_gguf


def test_every_metadata_type_and_tensor_agrees_with_the_stock_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 日本")
    writer.add_array("words", ["a", "", "é"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("reals", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.add_tensor("one", np.arange(5, dtype=np.float32))
    writer.add_tensor("two", np.arange(21, dtype=np.float16).reshape(3, 7))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file, stock = read_gguf(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in stock.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert file.metadata["words"] == ["a", "", "é"] and file.metadata["flags"] == [True, False]
    for theirs in stock.tensors:
        ours = file.tensors[theirs.name]
        assert ours.offset == theirs.data_offset and ours.num_bytes == theirs.n_bytes
        assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
        np.testing.assert_array_equal(file.raw(ours).reshape(-1), theirs.data.view(np.uint8).reshape(-1))


def test_type_table_agrees_with_the_gguf_package() -> None:
    for number, ours in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == ours.name and gguf.GGML_QUANT_SIZES[kind] == (ours.block_size, ours.type_bytes)
    for kind in gguf.GGMLQuantizationType:
        assert kind in GGML_TYPES or UNSUPPORTED_TYPES[kind] == kind.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "little-endian"),
        (b"GGUF" + struct.pack("<I", 3), "at byte 8 of 8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "items announced"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**50) + bytes(64), "the file ends before"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(64), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77) + bytes(9), "metadata type 77"),
    ],
)
def test_broken_heads_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=message):
        read_gguf(path)


def test_unsupported_types_are_refused_all_at_once(write_gguf) -> None:
    kinds = gguf.GGMLQuantizationType
    tensors = {
        "a": (np.zeros((1, 84), np.uint8), kinds.Q2_K),
        "b": (np.zeros((1, 18), np.uint8), kinds.IQ4_NL),
        "c": np.zeros(4, np.float32),
    }
    with pytest.raises(WeightError, match="has tensors in Q2_K, IQ4_NL; supported are F32"):
        read_gguf(write_gguf(tensors))


def test_truncated_data_names_tensor_and_offsets(write_gguf) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    last = max(read_gguf(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(whole[: last.offset + 4])
    with pytest.raises(WeightError, match=rf"'{last.name}' is at bytes {last.offset}\.\..*ends at {last.offset + 4}"):
        read_gguf(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_is_never_a_crash(write_gguf, tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, or one byte of the head changed: read, or refused as ours."""
    whole = bytearray(write_gguf().read_bytes())
    path = tmp_path / "damaged.gguf"
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 4096))])
    else:
        whole[data.draw(st.integers(0, 1200))] = data.draw(st.integers(0, 255))
        path.write_bytes(whole)
    try:
        file = read_gguf(path)
    except OstinatoError as error:
        assert str(path) in str(error)
    else:
        assert all(file.raw(tensor).size == tensor.num_bytes for tensor in file.tensors.values())


def test_reading_tensors_never_changes_the_file(write_gguf) -> None:
    path = write_gguf()
    before = path.read_bytes()
    file = read_gguf(path)
    file.raw(file.tensors["token_embd.weight"])[...] = 255
    assert path.read_bytes() == before
