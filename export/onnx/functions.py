"""The functions that an exported ONNX model consists of, in standard operators alone.

ONNX Runtime inlines them when it loads a model and folds what depends on constants only. Nothing is left to
unpack at run time; what remains of a `Layer` is one QLinearConv, of a `RealLayer` one QGemm.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from string import ascii_letters

import onnx
import onnx.parser

DOMAIN = "fedmpq"
# ONNX Runtime 1.20 and later know both; onnx's own newest are refused even by runtimes of the same month.
OPSET = 21
IR_VERSION = 10

# zero + integer weight = offset + sum place_i * bit_i, in the type of `zero`. Bytes up to the sums, so that
# loading takes little memory.
_WEIGHT = """
Weight <shape> (planes, place, offset, zero) => (weight)
{
    last = Constant <value_ints = [2]> ()
    bytes = Unsqueeze (planes, last)
    places = Constant <value = uint8[8] {0, 1, 2, 3, 4, 5, 6, 7}> ()
    shifted = BitShift <direction = "RIGHT"> (bytes, places)
    one = Constant <value = uint8[1] {1}> ()
    bits = BitwiseAnd (shifted, one)
    rows = Constant <value_ints = [0, -1]> ()
    by_plane = Reshape (bits, rows)
    sums = MatMulInteger (place, by_plane)
    first = Constant <value_ints = [0]> ()
    size = Constant <value_ints: ints = @shape> ()
    count = ReduceProd <keepdims = 1> (size)
    second = Constant <value_ints = [1]> ()
    codes = Slice (sums, first, count, second)
    integers = Add (codes, offset)
    typed = CastLike (integers, zero)
    weight = Reshape (typed, size)
}
"""

# `biases` and `multipliers` are those of all layers; one layer's are at start..stop.
_PARAMETERS = """
Parameters <shape, start, stop> (planes, place, offset, zero_w, biases, multipliers)
    => (weight, bias, multiplier)
{
    weight = fedmpq.Weight <shape: ints = @shape> (planes, place, offset, zero_w)
    begin = Constant <value_ints: ints = @start> ()
    end = Constant <value_ints: ints = @stop> ()
    bias = Slice (biases, begin, end)
    multiplier = Slice (multipliers, begin, end)
}
"""

# The scales of x and y are 1 and that of the weights is the multiplier, so what the runtime multiplies its
# sums by is the multiplier to the bit.
_REALS = """
Reals (x, zero_x, weight, zero_w, bias, multiplier) => (real_x, real_weight, real_bias)
{
    unit = Constant <value = float {1.0}> ()
    real_x = DequantizeLinear (x, unit, zero_x)
    channels = Shape (multiplier)
    zeros = Expand (zero_w, channels)
    real_weight = DequantizeLinear <axis = 0> (weight, multiplier, zeros)
    real_bias = DequantizeLinear <axis = 0> (bias, multiplier)
}
"""

# y = zero_y + rint(float(bias + sum (x - zero_x) * (w - zero_w)) * multiplier), saturated.
_ROUNDED = """
Rounded <strides, pads, dilations, group> (x, zero_x, weight, zero_w, bias, multiplier, zero_y) => (y)
{
    real_x, real_weight, real_bias = fedmpq.Reals (x, zero_x, weight, zero_w, bias, multiplier)
    real_y = Conv
        <strides: ints = @strides, pads: ints = @pads, dilations: ints = @dilations, group: int = @group>
        (real_x, real_weight, real_bias)
    unit = Constant <value = float {1.0}> ()
    y = QuantizeLinear (real_y, unit, zero_y)
}
"""

_LAYER = """
Layer <shape, start, stop,
       strides: ints = [1, 1], pads: ints = [0, 0, 0, 0], dilations: ints = [1, 1], group: int = 1>
    (x, zero_x, planes, place, offset, zero_w, biases, multipliers, zero_y) => (y)
{
    weight, bias, multiplier = fedmpq.Parameters
        <shape: ints = @shape, start: ints = @start, stop: ints = @stop>
        (planes, place, offset, zero_w, biases, multipliers)
    y = fedmpq.Rounded
        <strides: ints = @strides, pads: ints = @pads, dilations: ints = @dilations, group: int = @group>
        (x, zero_x, weight, zero_w, bias, multiplier, zero_y)
}
"""

# A Layer that reads the image (N, H, W, C) in groups of pixels, see pixel_groups. `groups` is the image's
# shape as groups, `size` the weight's, `image` the shape of the codes before they are (N, C, H, W).
_FIRST_LAYER = """
FirstLayer <shape, start, stop, groups, size, image, times, strides, pads, dilations: ints = [1, 1]>
    (x, zero_x, planes, place, offset, zero_w, biases, multipliers, zero_y, taps) => (y)
{
    narrow, own_bias, own_multiplier = fedmpq.Parameters
        <shape: ints = @shape, start: ints = @start, stop: ints = @stop>
        (planes, place, offset, zero_w, biases, multipliers)
    column = Constant <value_ints = [0, 0, 0, 0, 0, 0, 0, 1]> ()
    padded = Pad (narrow, column, zero_w)
    spread = Gather <axis = 3> (padded, taps)
    ordered = Transpose <perm = [3, 0, 5, 1, 2, 4]> (spread)
    weight_size = Constant <value_ints: ints = @size> ()
    weight = Reshape (ordered, weight_size)
    repeats = Constant <value_ints: ints = @times> ()
    bias = Tile (own_bias, repeats)
    multiplier = Tile (own_multiplier, repeats)
    group_size = Constant <value_ints: ints = @groups> ()
    grouped = Reshape (x, group_size)
    rows = Transpose <perm = [0, 3, 1, 2]> (grouped)
    codes = fedmpq.Rounded
        <strides: ints = @strides, pads: ints = @pads, dilations: ints = @dilations, group: int = 1>
        (rows, zero_x, weight, zero_w, bias, multiplier, zero_y)
    last = Transpose <perm = [0, 2, 3, 1]> (codes)
    image_size = Constant <value_ints: ints = @image> ()
    pixels = Reshape (last, image_size)
    y = Transpose <perm = [0, 3, 1, 2]> (pixels)
}
"""

# y = float(bias + sum (x - zero_x) * (w - zero_w)) * scale: the logits. The runtime makes one QGemm of it.
_REAL_LAYER = """
RealLayer <shape, start, stop> (x, zero_x, planes, place, offset, zero_w, biases, scales) => (y)
{
    weight, bias, scale = fedmpq.Parameters
        <shape: ints = @shape, start: ints = @start, stop: ints = @stop>
        (planes, place, offset, zero_w, biases, scales)
    real_x, real_weight, real_bias = fedmpq.Reals (x, zero_x, weight, zero_w, bias, scale)
    y = Gemm <transB = 1> (real_x, real_weight, real_bias)
}
"""

# The sum of each window as a convolution with ones: y = zero_y + rint(float(sum) * multiplier).
_AVERAGE = """
Average <shape, strides: ints = [1, 1], pads: ints = [0, 0, 0, 0], group: int = 1>
    (x, zero_x, multiplier, zero_y) => (y)
{
    unit = Constant <value = float {1.0}> ()
    real_x = DequantizeLinear (x, unit, zero_x)
    size = Constant <value_ints: ints = @shape> ()
    ones = ConstantOfShape <value = int8[1] {1}> (size)
    real_weight = DequantizeLinear (ones, multiplier)
    real_y = Conv <strides: ints = @strides, pads: ints = @pads, group: int = @group> (real_x, real_weight)
    y = QuantizeLinear (real_y, unit, zero_y)
}
"""

_HEADER = f'<opset_import: ["" : {OPSET}, "{DOMAIN}" : 1], domain: "{DOMAIN}">'
_TEXTS = (_WEIGHT, _PARAMETERS, _REALS, _ROUNDED, _LAYER, _FIRST_LAYER, _REAL_LAYER, _AVERAGE)
FUNCTIONS: dict[str, onnx.FunctionProto] = {}
for _text in _TEXTS:
    _function = onnx.parser.parse_function(_HEADER + _text)
    FUNCTIONS[_function.name] = _function


def functions(used: set[str]) -> list[onnx.FunctionProto]:
    """The functions named and those that they use, their values under the shortest names."""
    needed = set(used)
    # A function uses only those before it.
    for name, function in reversed(FUNCTIONS.items()):
        if name in needed:
            needed |= {node.op_type for node in function.node if node.domain == DOMAIN}
    return [_shortened(function) for name, function in FUNCTIONS.items() if name in needed]


def _shortened(function: onnx.FunctionProto) -> onnx.FunctionProto:
    short: dict[str, str] = {}

    def shorten(names: MutableSequence[str]) -> None:
        names[:] = [short.setdefault(name, ascii_letters[len(short)]) for name in names]

    result = onnx.FunctionProto()
    result.CopyFrom(function)
    shorten(result.input)
    for node in result.node:
        shorten(node.input)
        shorten(node.output)
    shorten(result.output)
    return result
