"""C++ kernels behind a plain C ABI, each with a scalar twin of the same signature.

`include/fedmpq/kernels.h` describes every function and the stored format of bit-planes. The functions here
check their arguments, allocate the result and call the library; other Python threads run meanwhile.
"""

from fedmpq.kernels.entropy import decode_codes, encode_codes
from fedmpq.kernels.grid import grid_noise, least_error_grids
from fedmpq.kernels.library import force_bit_serial, force_isa, force_winograd, isa, supported_isas
from fedmpq.kernels.philox import philox_block, philox_uniform
from fedmpq.kernels.planes import magnitude_counts, pack_planes, popcount_planes, unpack_planes

__all__ = [
    "decode_codes",
    "encode_codes",
    "force_bit_serial",
    "force_isa",
    "force_winograd",
    "grid_noise",
    "isa",
    "least_error_grids",
    "magnitude_counts",
    "pack_planes",
    "philox_block",
    "philox_uniform",
    "popcount_planes",
    "supported_isas",
    "unpack_planes",
]
