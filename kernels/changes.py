"""What boards have changed a layer by, in whole numbers; `include/fedmpq/kernels.h` states the formulas."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import Call, CheckedCall, Elements, KernelError
from fedmpq.kernels.prototypes import FedmpqChanges

CHANGE_BITS = 12
"""Changes kept within cells count `2^-CHANGE_BITS` of the distance between two codes."""
MAX_CHANGE_STEP = 16383
"""The greatest step of a change, in those units."""


def code_changes(
    sent: NDArray[np.uint8], trained: NDArray[np.uint8], fractions: NDArray[np.int8], rows: int, bits: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The steps of the rows, and the codes of what each weight has moved by in 256ths of a code."""
    if trained.size != sent.size or fractions.size != sent.size or rows < 1 or sent.size % rows:
        raise ValueError(
            f"{sent.size} codes, {trained.size} codes and {fractions.size} fractions do not fit one another, "
            f"or make no {rows} rows"
        )
    steps, codes = np.empty(rows, np.int32), np.empty(sent.size, np.uint8)
    CheckedCall(
        "fedmpq_code_changes",
        Elements(np.ascontiguousarray(sent), sent.size),
        Elements(np.ascontiguousarray(trained), sent.size),
        Elements(np.ascontiguousarray(fractions), sent.size),
        rows,
        sent.size // rows,
        bits,
        Elements(steps, rows),
        Elements(codes, sent.size),
    )()
    return steps, codes


class Changes:
    """The planes of boards that give back one layer at one bit-width, with steps and places.

    `planes` is u8[boards, bits, ceil(m/8)], `steps` i32[boards, rows], each row having `m / rows` weights,
    and `places` i32[m]. With `within`, changes are kept within the cells of codes.
    """

    def __init__(
        self,
        planes: NDArray[np.uint8],
        steps: NDArray[np.int32],
        places: NDArray[np.int32],
        within: bool,
    ) -> None:
        boards, bits, plane_bytes = planes.shape
        self.boards, self.weights = boards, places.size
        if steps.ndim != 2 or steps.shape[0] != boards or steps.shape[1] < 1:
            raise ValueError(f"{boards} boards have one row of steps each, not an array of {steps.shape}")
        rows = steps.shape[1]
        if places.size % rows or places.size == 0:
            raise ValueError(f"{places.size} weights cannot be divided into {rows} rows")
        if plane_bytes != (places.size + 7) // 8:
            raise ValueError(
                f"planes of {places.size} weights have {(places.size + 7) // 8} bytes each, not {plane_bytes}"
            )
        self._struct = FedmpqChanges(
            boards=boards, rows=rows, row=places.size // rows, bits=bits, within=within
        )
        for name, memory in (("planes", planes), ("steps", steps), ("places", places)):
            self._struct.point(name, memory, memory.size)

    def add_to(self, sums: NDArray[np.int64], weights: NDArray[np.int32]) -> None:
        """`sums[j] += sum over boards of weight * change[j]`; weights are not negative."""
        call = Call(
            "fedmpq_add_changes",
            self._struct,
            Elements(weights, self.boards),
            Elements(sums, self.weights),
        )
        self._refuse(call())

    def write(self, first: int, count: int, out: NDArray[np.float64]) -> None:
        """The changes of the weights from `first` on into f64[boards, count], which holds them exactly."""
        self._refuse(Call("fedmpq_changes", self._struct, first, count, Elements(out, self.boards * count))())

    def of(self, first: int, count: int) -> NDArray[np.float64]:
        """The same in an array of its own."""
        out = np.empty((self.boards, count))
        self.write(first, count, out)
        return out

    def _refuse(self, status: int) -> None:
        if status >= 0:
            raise ValueError(
                f"board {status} has padding bits set after weight {self.weights - 1}; they must be 0"
            )
        if status != -1:
            raise KernelError(
                f"{self.boards} boards of {self._struct.rows} rows of {self._struct.row} weights at "
                f"{self._struct.bits} bits: a step is outside 1..{MAX_CHANGE_STEP}, a weight is negative, "
                "or a size is outside what the kernel takes (fedmpq/kernels.h states the limits)"
            )


def add_whole_products(
    numbers: NDArray[np.float64], upper: NDArray[np.int64], lower: NDArray[np.int64]
) -> None:
    """Adds the scalar products of rows of whole numbers to `2^26 upper + lower`, i64[rows, rows] each; to the
    lower triangle alone, for they are symmetric."""
    rows, columns = numbers.shape
    CheckedCall(
        "fedmpq_whole_products",
        Elements(numbers, numbers.size),
        rows,
        columns,
        Elements(upper, rows * rows),
        Elements(lower, rows * rows),
    )()


def places(
    weights: NDArray[np.float32], codes: NDArray[np.uint8], steps: NDArray[np.float32], bits: int
) -> NDArray[np.int32]:
    """Where weights lie among the codes that they were quantized to, i32[m], one row for each step."""
    if codes.size != weights.size or steps.size == 0 or weights.size % steps.size or weights.size == 0:
        raise ValueError(
            f"{weights.size} weights, {codes.size} codes and {steps.size} steps do not fit one another"
        )
    found = np.empty(weights.size, np.int32)
    CheckedCall(
        "fedmpq_places",
        Elements(np.ascontiguousarray(weights), weights.size),
        Elements(np.ascontiguousarray(codes), codes.size),
        Elements(np.ascontiguousarray(steps), steps.size),
        steps.size,
        weights.size // steps.size,
        bits,
        Elements(found, found.size),
    )()
    return found
