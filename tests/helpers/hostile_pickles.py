"""Pickles that attack their reader: they change classes, exhaust memory or the stack, or call functions that are not
allowed."""

import struct

_INFO = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
_LAYOUT = b"ctorch.serialization\n_get_layout\n"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


_LONG = b"(" + b"K\x01" * 5_000 + b"tq\x00"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "state of a class": (_INFO + b"N}" + _text("__init__") + b"K\x01s\x86b.", "sets attributes of"),
    "state of a function": (_LAYOUT + b"N}" + _text("cache") + b"K\x01s\x86b.", "sets attributes of"),
    "items of a class": (_INFO + b"K\x01K\x02s.", "sets items of"),
    "a distant memo entry": (b"Nr" + struct.pack("<I", 2**29) + b"0.", "which no checkpoint needs"),
    "a nested tuple as a key": (b"})" + b"\x85" * 2_000_000 + b"Ns.", "levels deep"),
    "a tuple whose hash takes forever": (b"})" + b"q\x00h\x00\x86" * 40 + b"Ns.", "repeats its parts|which no"),
    "nested lists": (b"]" * 5000 + b"a" * 4999 + b".", "levels deep"),
    "a list that contains itself": (b"]q\x00h\x00a.", "already part of another|changes a value"),
    "a list that doubles": (b"]" + b"q\x00(h\x00h\x00l" * 9 + b".", "which no checkpoint needs"),
    "a tuple that doubles": (b")" + b"q\x00h\x00\x86" * 60 + b".", "repeats its parts"),
    "a change after its depth is known": (b"]q\x00]q\x01h\x00ah\x00h\x01a.", "already part of another"),
    "a long key that is hashed often": (_LONG + b"}h\x00Ns" * 5_000 + b"0.", "repeats its parts"),
    "a global as a key": (b"}" + _INFO + b"Ns.", "as a value"),
    "a called text": (_text("x") + b")R.", "it calls"),
    "too many arguments": (_INFO + b"K\x01\x85R.", "damaged"),
    "a number of thousands of digits": (b"I" + b"9" * 5000 + b"\n.", "damaged"),
    "a long integer": (b"\x8b" + struct.pack("<I", 1 << 16) + b"\x7f" * (1 << 16) + b".", "which no checkpoint needs"),
    "a text beyond the end": (b"X" + struct.pack("<I", 2**31) + b"abc.", "damaged"),
    "a text of 2^62 bytes": (b"\x8d" + struct.pack("<Q", 2**62) + b"abc.", "damaged"),
    "an extension": (b"\x82\x01.", "which no checkpoint needs"),
    "an object of its own class": (b"(i__main__\nA\n.", "which no checkpoint needs"),
    "nothing on the stack": (b"\x86.", "damaged"),
    "only a mark": (b"(.", "a mark"),
    "no mark": (b"t.", "damaged"),
    "an unknown memo entry": (b"h\x07.", "damaged"),
    "no end": (b"\x80\x02N", "damaged|no end"),
    "nothing": (b"", "damaged|no end"),
}
"""Name -> (the pickle, a pattern for its error message)."""

HOSTILE_STATES: dict[str, tuple[bytes, str]] = {
    **HOSTILE,
    "a long call that is made often": (_LONG + b"ctorch\ndevice\nq\x01" + b"h\x01h\x00R" * 5_000 + b".", "repeats"),
    "a dictionary that is copied often": (
        b"]q\x00("
        + b"K\x01K\x02\x86" * 5_000
        + b"e\x85q\x01ccollections\nOrderedDict\nq\x02"
        + b"h\x02h\x01R" * 5_000
        + b".",
        "repeats its parts",
    ),
    "a state that is set often": (
        b"}q\x00("
        + b"".join(_text(str(n)) + b"N" for n in range(5_000))
        + b"ucargparse\nNamespace\nq\x01"
        + b"h\x01)Rh\x00b" * 5_000
        + b".",
        "repeats its parts",
    ),
    "a huge storage": (b"ctorch\nFloatStorage\n(K\x00\x8a\x05\x00\x00\x00\x00\x02tR.", "it calls"),
    "a huge tensor": (b"ctorch\nTensor\n" + b"\x8a\x05\x00\x00\x00\x00\x02\x85R.", ""),
    "a huge byte array": (b"c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.", ""),
    "a tensor of no storage": (_TENSOR + b"(NK\x00K\x01\x85K\x01\x85\x89NtR.", "no valid shape"),
    "a storage that is not there": (
        _TENSOR + b"((" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("9") + _text("cpu") + b"K\x01tQ"
        b"K\x00K\x01\x85K\x01\x85\x89NtR.",
        "does not contain",
    ),
}
"""The same for files of torch.save; without a pattern the file may be read, as long as that takes no memory."""
