# SPDX-License-Identifier: BSD-3-Clause
"""Writes the hostile files of this folder and, beside each, the text it must be refused with.

usage: make_attacks.py            writes into its own folder; the results are committed
"""

import json
import struct
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASTAGNOLI = 0x82F63B78


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def write(name, data, refusal):
    (HERE / name).write_bytes(data)
    (HERE / name).with_suffix(".refusal").write_text(refusal + "\n")


def safetensors(name, header, refusal, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    write(f"{name}.safetensors", struct.pack("<Q", len(text) if length is None else length) + text + data, refusal)


def tensor(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def tensors():
    write("empty.safetensors", b"", "has 0 bytes; a safetensors file has 8 at least")
    write("seven_bytes.safetensors", b"\1" + b"\0" * 6, "has 7 bytes; a safetensors file has 8 at least")
    safetensors("length_beyond_file", {"a": tensor()}, "the header says it is 4096 bytes long", length=4096)
    safetensors("length_beyond_limit", {"a": tensor()}, "the header says it is 100000001 bytes long", length=100_000_001)
    safetensors("length_negative", {"a": tensor()}, "the header says it is 18446744073709551615 bytes long", length=2**64 - 1)
    safetensors("length_zero", b"", "the header does not start with '{'")
    safetensors("not_json", b"hello", "the header does not start with '{'")
    safetensors("leading_space", b" {}", "the header does not start with '{'", data=b"")
    safetensors("array", b"[1, 2]", "the header does not start with '{'")
    safetensors("cut_off", b'{"a":{"dtype":"F32"', "not JSON")
    safetensors("text_after", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} x', "not JSON")
    safetensors("zero_bytes", b'{\0"a":1}', "not JSON")
    safetensors("bad_utf8", b'{"\xff\xfe":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "not JSON")
    safetensors("comment", b'{/* */"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "not JSON")
    one = json.dumps(tensor()).encode()
    safetensors("duplicate_name", b'{"a":' + one + b',"a":' + one + b"}", "the name 'a' appears twice")
    safetensors("duplicate_escaped", b'{"a":' + one + b',"\\u0061":' + one + b"}", "the name 'a' appears twice")
    safetensors("duplicate_member", b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "the name 'dtype' appears twice")
    safetensors("empty_name", {"": tensor()}, "a tensor has an empty name")
    safetensors("control_name", {"a\nb": tensor()}, "a tensor's name has a control character")
    safetensors("null_name", {"a\0b": tensor()}, "a tensor's name has a control character")
    safetensors("not_an_object", {"a": 7}, "tensor 'a' is 7; expected an object")
    safetensors("no_dtype", {"a": {"shape": [2], "data_offsets": [0, 8]}}, "tensor 'a' has no 'dtype'")
    safetensors("no_shape", {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "tensor 'a' has no 'shape'")
    safetensors("no_offsets", {"a": {"dtype": "F32", "shape": [2]}}, "tensor 'a' has no 'data_offsets'")
    safetensors("extra_member", {"a": tensor(path="/etc/passwd")}, "expected dtype, shape and data_offsets only")
    safetensors("unknown_dtype", {"a": tensor(dtype="F31")}, "expected a dtype of the safetensors format")
    safetensors("dtype_number", {"a": tensor(dtype=4)}, "tensor 'a'.dtype is 4; expected a text")
    safetensors("shape_negative", {"a": tensor(shape=(-2,))}, "tensor 'a'.shape is -2; expected an integer of at least 0")
    safetensors("shape_fraction", {"a": tensor(shape=(2.0,))}, "tensor 'a'.shape is 2.0; expected an integer")
    safetensors("shape_text", {"a": tensor(shape=("2",))}, "expected an integer of at least 0")
    safetensors("shape_overflow", {"a": tensor(shape=(2**62, 4))}, "expected a shape whose bytes can be counted in 63 bits")
    safetensors("shape_wraps_to_right_size", {"a": tensor(shape=(2**32, 2**32, 2))}, "expected a shape whose bytes can be counted in 63 bits")
    safetensors("shape_beyond_int64", {"a": tensor(shape=(2**64,))}, "expected an integer of at least 0")
    safetensors("shape_many_dimensions", {"a": tensor(shape=(1,) * 65, offsets=(0, 4))}, "expected at most 64 dimensions")
    safetensors("offsets_one", {"a": tensor(offsets=(8,))}, "expected two numbers")
    safetensors("offsets_three", {"a": tensor(offsets=(0, 4, 8))}, "expected two numbers")
    safetensors("offsets_negative", {"a": tensor(offsets=(-8, 0))}, "expected an integer of at least 0")
    safetensors("offsets_backwards", {"a": tensor(offsets=(8, 0))}, "expected an integer of at least 8")
    safetensors("offsets_beyond", {"a": tensor(shape=(4,), offsets=(0, 16))}, "expected offsets within the file's 8 bytes of data")
    safetensors("offsets_overflow", {"a": tensor(offsets=(2**63 - 8, 2**63 - 1))}, "expected offsets within the file's 8 bytes of data")
    safetensors("offsets_beyond_int64", {"a": tensor(offsets=(2**64 - 8, 2**64))}, "expected an integer of at least 0")
    safetensors("offsets_infinite", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}', "not JSON")
    safetensors("size_too_small", {"a": tensor(shape=(1,))}, "expected 4 bytes, as dtype and shape say")
    safetensors("size_too_large", {"a": tensor(shape=(3,))}, "expected 12 bytes, as dtype and shape say")
    safetensors("overlap", {"a": tensor(), "b": tensor(shape=(1,), offsets=(4, 8))}, "(it overlaps another)")
    safetensors("same_bytes_twice", {"a": tensor(), "b": tensor()}, "(it overlaps another)")
    safetensors("hole_before", {"a": tensor(shape=(1,), offsets=(4, 8))}, "(there is a hole)")
    safetensors("hole_between", {"a": tensor(shape=(1,), offsets=(0, 4)), "b": tensor(shape=(1,), offsets=(8, 12))}, "(there is a hole)", data=b"\0" * 12)
    safetensors("trailing_bytes", {"a": tensor()}, "1 bytes after the last tensor", data=b"\0" * 9)
    safetensors("truncated", {"a": tensor()}, "expected offsets within the file's 7 bytes of data", data=b"\0" * 7)
    safetensors("metadata_number", {"__metadata__": {"step": 3}, "a": tensor()}, "expected a text")
    safetensors("metadata_nested", {"__metadata__": {"a": {"b": "c"}}, "a": tensor()}, "expected a text")
    safetensors("nested", b'{"a":{"dtype":[["F32"]],"shape":[2],"data_offsets":[0,8]}}', "nested more than 3 deep")


def manifest(**changes):
    value = {
        "format": "trueshard checkpoint", "format_version": 1, "library_version": "0", "torch_version": "0", "id": "0",
        "world_size": 1, "step": 0, "ranks_file": "",
        "entries": {"trainer": {"kind": "module", "file": "model.safetensors", "frozen_parameters": [], "buffers": []}},
        "files": [{"name": "model.safetensors", "bytes": 100, "header_crc32c": "00000000", "tensors": [
            {"name": "w", "dtype": "F32", "shape": [2], "crc32c": "00000000"}]}],
    }
    value.update(changes)
    return value


def sealed(name, value, refusal):
    text = value if isinstance(value, bytes) else json.dumps(value, indent=1).encode()
    body = text.rstrip()[:-1].rstrip()
    write(f"{name}.json", body + b',\n"crc32c":"%08x"}\n' % crc32c(body), refusal)


def one_file(**changes):
    return [{**manifest()["files"][0], **changes}]


def one_tensor(**changes):
    return one_file(tensors=[{**manifest()["files"][0]["tensors"][0], **changes}])


def manifests():
    write("manifest_empty.json", b"", "does not end with its checksum")
    write("manifest_unsealed.json", json.dumps(manifest()).encode(), "does not end with its checksum")
    good = json.dumps(manifest(), indent=1).encode()
    write("manifest_wrong_sum.json", good[:-2] + b',\n"crc32c":"00000000"}\n', "it was changed or cut off after it was written")
    sealed("manifest_not_json", b"nonsense}", "not JSON")
    sealed("manifest_other_format", manifest(format="something else"), "expected 'trueshard checkpoint'")
    sealed("manifest_newer", manifest(format_version=2), "expected version 1; a newer trueshard wrote it")
    sealed("manifest_no_world", manifest(world_size=0), "expected an integer of at least 1")
    for number, path in enumerate(["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b"]):
        sealed(f"manifest_path_{number}", manifest(files=one_file(name=path)), "is not the name of a file inside the folder")
    sealed("manifest_itself_listed", manifest(files=one_file(name="manifest.json")), "file 'manifest.json' is listed twice")
    sealed("manifest_file_twice", manifest(files=one_file() * 2), "file 'model.safetensors' is listed twice")
    sealed("manifest_tensor_twice", manifest(files=one_file(tensors=one_file()[0]["tensors"] * 2)), "tensor 'w' of 'model.safetensors' is listed twice")
    entry = manifest()["entries"]["trainer"]
    sealed("manifest_unlisted_file", manifest(entries={"trainer": {**entry, "file": "other.safetensors"}}), "which is not listed")
    sealed("manifest_no_file", manifest(entries={"trainer": {**entry, "file": ""}}), "which is not listed")
    sealed("manifest_unlisted_ranks", manifest(ranks_file="../ranks"), "which is not listed")
    sealed("manifest_kind", manifest(entries={"x": {"kind": "pickle"}}), "expected a kind this version knows")
    sealed("manifest_value_type", manifest(entries={"x": {"kind": "integer", "value": "7"}}), "expected an integer")
    sealed("manifest_value_missing", manifest(entries={"x": {"kind": "number"}}), "has no 'value'")
    sealed("manifest_scaler", manifest(entries={"x": {"kind": "grad_scaler", "scaler": 1}}), "expected an object")
    sealed("manifest_bytes", manifest(files=one_file(bytes=-1)), "expected an integer of at least 8")
    sealed("manifest_sum", manifest(files=one_file(header_crc32c="xyz")), "expected eight hexadecimal digits")
    sealed("manifest_dtype", manifest(files=one_tensor(dtype="PICKLE")), "expected a dtype of the safetensors format")
    sealed("manifest_shape", manifest(files=one_tensor(shape=[2**62, 8])), "expected a shape whose bytes can be counted in 63 bits")
    sealed("manifest_shape_negative", manifest(files=one_tensor(shape=[-1])), "expected an integer of at least 0")
    deep = json.dumps(manifest()).encode()[:-1] + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}"
    sealed("manifest_deep", deep, "nested more than 12 deep")
    sealed("manifest_duplicate", b'{"format":"trueshard checkpoint","format":"trueshard checkpoint"}', "the name 'format' appears twice")


if __name__ == "__main__":
    for old in [*HERE.glob("*.safetensors"), *HERE.glob("*.json"), *HERE.glob("*.refusal")]:
        old.unlink()
    tensors()
    manifests()
