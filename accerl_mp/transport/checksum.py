"""A checksum that runs at the speed of memory: a sample's bytes are summed where they are made, at ingest and in the trainer.

A group of 8 samples with 8,000 tokens is 1.6 MB: CRC-32 takes 300 to 600 us for that on a core here, this FIXME.
"""

import zlib

import numpy as np

_ROW = 512
"""Words of 8 bytes in a row: a page of a ring."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """32 bits over `data`: the CRC of its length, of sums of its 8-byte words, and of the bytes after the last whole row.

    Words lie in rows of 512, and each row and each column is summed (mod 2^64). Sums of rows tell pages that are wrong or in the place
    of another, sums of columns tell words that are in the place of others: a change of one or two words, or of one page, changes a sum
    always, and sums that differ have the same CRC once in 2^32.
    """
    num_bytes = len(data)
    num_rows = num_bytes // (8 * _ROW)
    value = zlib.crc32(num_bytes.to_bytes(8, "little"))
    if num_rows:
        rows = np.frombuffer(data, "<u8", num_rows * _ROW).reshape(num_rows, _ROW)
        value = zlib.crc32(np.add.reduce(rows, axis=1), value)
        value = zlib.crc32(np.add.reduce(rows, axis=0), value)
    return zlib.crc32(memoryview(data)[num_rows * 8 * _ROW :], value)
