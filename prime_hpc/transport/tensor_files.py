"""Files of safetensors in memory: where tensors lie in a file is settled before they come.

The format (https://github.com/huggingface/safetensors#format) is the length of a header in 8 bytes, the header in JSON,
and the tensors without gaps between them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from prime_hpc.transport.buckets import dtype_of, size_of
from prime_hpc.transport.weights import TensorEntry

LENGTH_BYTES = 8
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
         "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip
"""Of dtypes, by torch's."""


@dataclass(frozen=True)
class FileLayout:
    """The head of a file with the length of its header, the place of every tensor, and the size of the whole, in bytes.

    Tensors of wide dtypes come first, so that each begins at a multiple of its own width.
    """

    head: bytes
    places: dict[str, tuple[int, TensorEntry]]
    nbytes: int

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> "FileLayout":
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for entry in sorted(entries, key=lambda entry: -dtype_of(entry).itemsize):
            begins[entry.name] = (end, entry)
            begin, end = end, end + size_of(entry)
            header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        head = len(text).to_bytes(LENGTH_BYTES, "little") + text
        places = {name: (len(head) + begin, entry) for name, (begin, entry) in begins.items()}
        return cls(head, places, len(head) + end)

    def view(self, image: Tensor, name: str) -> Tensor:
        """The tensor `name` within uint8[nbytes], the bytes of the file."""
        begin, entry = self.places[name]
        return image[begin : begin + size_of(entry)].view(dtype_of(entry)).view(entry.shape)
