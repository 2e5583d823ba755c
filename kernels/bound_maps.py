"""What lies between a layer's passes, a few numbers a channel, as bound calls (`call`)."""

from __future__ import annotations

from ctypes import c_float

from fedmpq.kernels.call import Call, CheckedCall, Elements
from fedmpq.kernels.memory import Memory
from fedmpq.kernels.prototypes import FedmpqChannelMap


def map_channels(channel_map: FedmpqChannelMap, source: c_float, target: c_float) -> Call:
    """Both scales are read when the call is made. Raises FloatingPointError if the map is not finite."""
    return CheckedCall("fedmpq_map_channels", channel_map, source, target)


def side_gradients(
    sums: Memory,
    channels: int,
    count: int,
    below: bool,
    clip: Memory,
    shift: Memory | None,
    scale: Memory | None,
    means: tuple[Memory, Memory],
) -> Call:
    """Raises FloatingPointError if a sum is not finite. With a `count` of 0 the means are 0."""
    return CheckedCall(
        "fedmpq_side_gradients",
        Elements(sums, 4 * channels),
        channels,
        count,
        below,
        Elements(clip, 1),
        None if shift is None else Elements(shift, channels),
        None if scale is None else Elements(scale, channels),
        *(Elements(mean, channels) for mean in means),
    )


def error_scales(
    greatest: Memory,
    images: int,
    source: c_float,
    weight_scale: Memory,
    channels: int,
    numbers: Memory,
    scales: Memory,
) -> Call:
    """The scale of 8-bit errors and its inverse into `numbers`. Raises FloatingPointError if the greatest
    error is not finite."""
    return CheckedCall(
        "fedmpq_error_scales",
        Elements(greatest, images),
        images,
        source,
        Elements(weight_scale, channels),
        channels,
        Elements(numbers, 2),
        Elements(scales, channels),
    )
