"""The C interface as ctypes sees it; `python -m tools.c_interface` writes this file from include/fedmpq."""

from __future__ import annotations

from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any, NamedTuple

from fedmpq.kernels.memory import CStruct


class Argument(NamedTuple):
    name: str
    type: Any
    """Its ctypes type; of a pointer to a structure, the structure."""
    element: str | None = None
    """The type of the elements, if it points to numbers."""


class Prototype(NamedTuple):
    result: Any
    arguments: tuple[Argument, ...]


class FedmpqChanges(CStruct):
    elements = {"planes": "uint8", "steps": "int32", "places": "int32"}
    _fields_ = [
        ("planes", c_void_p),
        ("steps", c_void_p),
        ("places", c_void_p),
        ("boards", c_int64),
        ("rows", c_int64),
        ("row", c_int64),
        ("bits", c_int32),
        ("within", c_int32),
    ]


class FedmpqConv(CStruct):
    elements = {}
    _fields_ = [
        ("images", c_int32),
        ("height", c_int32),
        ("width", c_int32),
        ("channels", c_int32),
        ("out_height", c_int32),
        ("out_width", c_int32),
        ("out_channels", c_int32),
        ("kernel_h", c_int32),
        ("kernel_w", c_int32),
        ("stride_h", c_int32),
        ("stride_w", c_int32),
        ("pad_h", c_int32),
        ("pad_w", c_int32),
        ("dilation_h", c_int32),
        ("dilation_w", c_int32),
        ("groups", c_int32),
    ]


class FedmpqCodes(CStruct):
    elements = {"data": "uint8"}
    _fields_ = [
        ("data", c_void_p),
        ("pairs", c_int32),
        ("zero", c_int32),
    ]


class FedmpqExtent(CStruct):
    elements = {}
    _fields_ = [
        ("images", c_int32),
        ("pixels", c_int64),
        ("channels", c_int32),
    ]


class FedmpqPool(CStruct):
    elements = {"rows": "int32", "columns": "int32"}
    _fields_ = [
        ("images", c_int32),
        ("height", c_int32),
        ("width", c_int32),
        ("channels", c_int32),
        ("out_height", c_int32),
        ("out_width", c_int32),
        ("rows", c_void_p),
        ("columns", c_void_p),
    ]


class FedmpqRescale(CStruct):
    elements = {"scale": "float32", "shift": "float32"}
    _fields_ = [
        ("scale", c_void_p),
        ("shift", c_void_p),
        ("low", c_float),
        ("high", c_float),
    ]


class FedmpqNormalize(CStruct):
    elements = {"norm": "float32", "bias": "float32"}
    _fields_ = [
        ("norm", c_void_p),
        ("bias", c_void_p),
    ]


class FedmpqChannelMap(CStruct):
    elements = {"scale": "float32", "offset": "float32", "gamma": "float32", "beta": "float32", "unit": "float32", "sums": "float64", "statistics": "float64", "t_scale": "float32", "t_shift": "float32", "norm": "float32", "bias": "float32", "gain": "float32"}
    _fields_ = [
        ("channels", c_int32),
        ("count", c_int64),
        ("eps", c_double),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("gamma", c_void_p),
        ("beta", c_void_p),
        ("unit", c_void_p),
        ("sums", c_void_p),
        ("statistics", c_void_p),
        ("mean_at", c_int64),
        ("variance_at", c_int64),
        ("t_scale", c_void_p),
        ("t_shift", c_void_p),
        ("norm", c_void_p),
        ("bias", c_void_p),
        ("gain", c_void_p),
    ]


class FedmpqUpdate(CStruct):
    elements = {"step": "float32", "rate": "float32", "momentum_scales": "float32", "fractions": "int8", "pull": "float32"}
    _fields_ = [
        ("bits", c_int32),
        ("count", c_int64),
        ("row", c_int64),
        ("step", c_void_p),
        ("rate", c_void_p),
        ("weight_decay", c_float),
        ("momentum", c_float),
        ("momentum_bits", c_int32),
        ("momentum_codes", c_void_p),
        ("momentum_scales", c_void_p),
        ("fractions", c_void_p),
        ("pull", c_void_p),
        ("round", c_uint32),
        ("layer", c_uint32),
        ("seed", c_uint32),
        ("client", c_uint32),
    ]


PROTOTYPES = {
    "fedmpq_isa": Prototype(c_char_p, ()),
    "fedmpq_force_isa": Prototype(c_int32, (
        Argument("name", c_char_p),)),
    "fedmpq_pack_planes": Prototype(c_int64, (
        Argument("codes", c_void_p, "uint8"),
        Argument("m", c_int64),
        Argument("bits", c_int32),
        Argument("planes", c_void_p, "uint8"),)),
    "fedmpq_unpack_planes": Prototype(c_int32, (
        Argument("planes", c_void_p, "uint8"),
        Argument("m", c_int64),
        Argument("bits", c_int32),
        Argument("codes", c_void_p, "uint8"),)),
    "fedmpq_popcount_planes": Prototype(c_int32, (
        Argument("planes", c_void_p, "uint8"),
        Argument("plane_bytes", c_int64),
        Argument("bits", c_int32),
        Argument("counts", c_void_p, "int64"),)),
    "fedmpq_magnitude_counts": Prototype(c_int64, (
        Argument("codes", c_void_p, "uint8"),
        Argument("m", c_int64),
        Argument("bits", c_int32),
        Argument("counts", c_void_p, "int64"),)),
    "fedmpq_add_changes": Prototype(c_int64, (
        Argument("changes", FedmpqChanges),
        Argument("weights", c_void_p, "int32"),
        Argument("sums", c_void_p, "int64"),)),
    "fedmpq_changes": Prototype(c_int64, (
        Argument("changes", FedmpqChanges),
        Argument("first", c_int64),
        Argument("count", c_int64),
        Argument("out", c_void_p, "float64"),)),
    "fedmpq_whole_products": Prototype(c_int32, (
        Argument("numbers", c_void_p, "float64"),
        Argument("rows", c_int64),
        Argument("columns", c_int64),
        Argument("upper", c_void_p, "int64"),
        Argument("lower", c_void_p, "int64"),)),
    "fedmpq_code_changes": Prototype(c_int32, (
        Argument("sent", c_void_p, "uint8"),
        Argument("trained", c_void_p, "uint8"),
        Argument("fractions", c_void_p, "int8"),
        Argument("rows", c_int64),
        Argument("row", c_int64),
        Argument("bits", c_int32),
        Argument("steps", c_void_p, "int32"),
        Argument("codes", c_void_p, "uint8"),)),
    "fedmpq_places": Prototype(c_int32, (
        Argument("weights", c_void_p, "float32"),
        Argument("codes", c_void_p, "uint8"),
        Argument("steps", c_void_p, "float32"),
        Argument("rows", c_int64),
        Argument("row", c_int64),
        Argument("bits", c_int32),
        Argument("places", c_void_p, "int32"),)),
    "fedmpq_grid_noise": Prototype(c_int32, (
        Argument("rows", c_void_p, "float32"),
        Argument("count", c_int64),
        Argument("length", c_int64),
        Argument("steps", c_void_p, "float32"),
        Argument("bits", c_int32),
        Argument("noise", c_void_p, "float64"),)),
    "fedmpq_least_error_grids": Prototype(c_int32, (
        Argument("weights", c_void_p, "float32"),
        Argument("size", c_int64),
        Argument("starts", c_void_p, "int64"),
        Argument("counts", c_void_p, "int64"),
        Argument("lengths", c_void_p, "int64"),
        Argument("bits", c_void_p, "int32"),
        Argument("grids", c_int64),
        Argument("searched", c_int64),
        Argument("threads", c_int32),
        Argument("firsts", c_void_p, "int64"),
        Argument("room", c_int64),
        Argument("steps", c_void_p, "float32"),
        Argument("noise", c_void_p, "float64"),)),
    "fedmpq_encode_codes": Prototype(c_int64, (
        Argument("codes", c_void_p, "uint8"),
        Argument("n", c_int64),
        Argument("bits", c_int32),
        Argument("coded", c_void_p, "uint8"),
        Argument("room", c_int64),)),
    "fedmpq_decode_codes": Prototype(c_int32, (
        Argument("coded", c_void_p, "uint8"),
        Argument("length", c_int64),
        Argument("n", c_int64),
        Argument("bits", c_int32),
        Argument("codes", c_void_p, "uint8"),)),
    "fedmpq_philox4x32": Prototype(c_int32, (
        Argument("counter", c_void_p, "uint32"),
        Argument("key", c_void_p, "uint32"),
        Argument("out", c_void_p, "uint32"),)),
    "fedmpq_philox_uniform": Prototype(c_int32, (
        Argument("n", c_int64),
        Argument("c1", c_uint32),
        Argument("c2", c_uint32),
        Argument("c3", c_uint32),
        Argument("k0", c_uint32),
        Argument("k1", c_uint32),
        Argument("out", c_void_p, "float32"),)),
    "fedmpq_conv_forward": Prototype(c_int32, (
        Argument("conv", FedmpqConv),
        Argument("codes", FedmpqCodes),
        Argument("weights", c_void_p, "int8"),
        Argument("bits", c_uint32),
        Argument("threads", c_int32),
        Argument("acc", c_void_p, "int32"),
        Argument("sums", c_void_p, "float64"),)),
    "fedmpq_force_bit_serial": Prototype(None, (
        Argument("most_bits", c_int32),)),
    "fedmpq_force_winograd": Prototype(None, (
        Argument("how", c_int32),)),
    "fedmpq_conv_backward_sums": Prototype(c_int32, (
        Argument("conv", FedmpqConv),
        Argument("codes", FedmpqCodes),
        Argument("weights", c_void_p, "int8"),
        Argument("bits", c_uint32),
        Argument("kept", c_void_p, "int16"),
        Argument("fit", c_void_p, "int32"),
        Argument("error", c_void_p, "uint16"),
        Argument("rescale", FedmpqRescale),
        Argument("normalize", FedmpqNormalize),
        Argument("threads", c_int32),
        Argument("acc", c_void_p, "int32"),
        Argument("sums", c_void_p, "float64"),)),
    "fedmpq_keep": Prototype(c_int32, (
        Argument("acc", c_void_p, "int32"),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("threads", c_int32),
        Argument("kept", c_void_p, "int16"),
        Argument("fit", c_void_p, "int32"),)),
    "fedmpq_drop": Prototype(c_int32, (
        Argument("codes", FedmpqCodes),
        Argument("extent", FedmpqExtent),
        Argument("whole", c_int32),
        Argument("rate", c_float),
        Argument("c1", c_uint32),
        Argument("c2", c_uint32),
        Argument("c3", c_uint32),
        Argument("k0", c_uint32),
        Argument("k1", c_uint32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_drop_errors": Prototype(c_int32, (
        Argument("extent", FedmpqExtent),
        Argument("whole", c_int32),
        Argument("rate", c_float),
        Argument("factor", c_float),
        Argument("c1", c_uint32),
        Argument("c2", c_uint32),
        Argument("c3", c_uint32),
        Argument("k0", c_uint32),
        Argument("k1", c_uint32),
        Argument("threads", c_int32),
        Argument("error", c_void_p, "uint16"),)),
    "fedmpq_conv_backward_input": Prototype(c_int32, (
        Argument("conv", FedmpqConv),
        Argument("errors", c_void_p, "int8"),
        Argument("weights", c_void_p, "int8"),
        Argument("bits", c_uint32),
        Argument("scale", c_float),
        Argument("add", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),)),
    "fedmpq_conv_backward_weights": Prototype(c_int32, (
        Argument("conv", FedmpqConv),
        Argument("codes", FedmpqCodes),
        Argument("errors", c_void_p, "int8"),
        Argument("scale", c_void_p, "float32"),
        Argument("threads", c_int32),
        Argument("gradient", c_void_p, "float32"),)),
    "fedmpq_requantize": Prototype(c_int32, (
        Argument("acc", c_void_p, "int32"),
        Argument("extent", FedmpqExtent),
        Argument("rescale", FedmpqRescale),
        Argument("pairs", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_backward_error": Prototype(c_int32, (
        Argument("acc", c_void_p, "int32"),
        Argument("error", c_void_p, "uint16"),
        Argument("extent", FedmpqExtent),
        Argument("rescale", FedmpqRescale),
        Argument("normalize", FedmpqNormalize),
        Argument("gain", c_void_p, "float32"),
        Argument("mean_g", c_void_p, "float32"),
        Argument("mean_gx", c_void_p, "float32"),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),
        Argument("greatest", c_void_p, "float32"),)),
    "fedmpq_conv_requantize": Prototype(c_int32, (
        Argument("conv", FedmpqConv),
        Argument("codes", FedmpqCodes),
        Argument("weights", c_void_p, "int8"),
        Argument("bits", c_uint32),
        Argument("rescale", FedmpqRescale),
        Argument("pairs", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_conv_backward_error": Prototype(c_int32, (
        Argument("conv", FedmpqConv),
        Argument("codes", FedmpqCodes),
        Argument("weights", c_void_p, "int8"),
        Argument("bits", c_uint32),
        Argument("error", c_void_p, "uint16"),
        Argument("rescale", FedmpqRescale),
        Argument("normalize", FedmpqNormalize),
        Argument("gain", c_void_p, "float32"),
        Argument("mean_g", c_void_p, "float32"),
        Argument("mean_gx", c_void_p, "float32"),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),
        Argument("greatest", c_void_p, "float32"),)),
    "fedmpq_map_channels": Prototype(c_int32, (
        Argument("map", FedmpqChannelMap),
        Argument("source", c_float),
        Argument("target", c_float),)),
    "fedmpq_side_gradients": Prototype(c_int32, (
        Argument("sums", c_void_p, "float64"),
        Argument("channels", c_int32),
        Argument("count", c_int64),
        Argument("below", c_int32),
        Argument("clip", c_void_p, "float32"),
        Argument("shift", c_void_p, "float32"),
        Argument("scale", c_void_p, "float32"),
        Argument("mean_g", c_void_p, "float32"),
        Argument("mean_gx", c_void_p, "float32"),)),
    "fedmpq_error_scales": Prototype(c_int32, (
        Argument("greatest", c_void_p, "float32"),
        Argument("images", c_int32),
        Argument("source", c_float),
        Argument("weight_scale", c_void_p, "float32"),
        Argument("channels", c_int32),
        Argument("numbers", c_void_p, "float32"),
        Argument("scales", c_void_p, "float32"),)),
    "fedmpq_quantize_error": Prototype(c_int32, (
        Argument("error", c_void_p, "uint16"),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("inverse", c_float),
        Argument("c1", c_uint32),
        Argument("c2", c_uint32),
        Argument("c3", c_uint32),
        Argument("k0", c_uint32),
        Argument("k1", c_uint32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "int8"),)),
    "fedmpq_add": Prototype(c_int32, (
        Argument("left", FedmpqCodes),
        Argument("left_scale", c_float),
        Argument("right", FedmpqCodes),
        Argument("right_scale", c_float),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("step", c_float),
        Argument("low", c_float),
        Argument("high", c_float),
        Argument("pairs", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),
        Argument("states", c_void_p, "uint8"),)),
    "fedmpq_clip_gradient": Prototype(c_int32, (
        Argument("clipped", c_void_p, "float64"),
        Argument("below", c_int32),
        Argument("clip", c_void_p, "float32"),)),
    "fedmpq_pass_error": Prototype(c_int32, (
        Argument("states", c_void_p, "uint8"),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("threads", c_int32),
        Argument("error", c_void_p, "uint16"),
        Argument("clipped", c_void_p, "float64"),)),
    "fedmpq_lookup": Prototype(c_int32, (
        Argument("codes", FedmpqCodes),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("table", c_void_p, "uint8"),
        Argument("pairs", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_lookup_backward": Prototype(c_int32, (
        Argument("codes", FedmpqCodes),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("slopes", c_void_p, "float32"),
        Argument("states", c_void_p, "uint8"),
        Argument("threads", c_int32),
        Argument("error", c_void_p, "uint16"),
        Argument("clipped", c_void_p, "float64"),)),
    "fedmpq_multiply": Prototype(c_int32, (
        Argument("left", FedmpqCodes),
        Argument("right", FedmpqCodes),
        Argument("extent", FedmpqExtent),
        Argument("spread", c_int32),
        Argument("multiplier", c_float),
        Argument("low", c_float),
        Argument("high", c_float),
        Argument("pairs", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_multiply_backward": Prototype(c_int32, (
        Argument("left", FedmpqCodes),
        Argument("right", FedmpqCodes),
        Argument("extent", FedmpqExtent),
        Argument("spread", c_int32),
        Argument("multiplier", c_float),
        Argument("low", c_float),
        Argument("high", c_float),
        Argument("left_scale", c_float),
        Argument("right_scale", c_float),
        Argument("error", c_void_p, "uint16"),
        Argument("threads", c_int32),
        Argument("left_error", c_void_p, "uint16"),
        Argument("right_error", c_void_p, "uint16"),
        Argument("clipped", c_void_p, "float64"),)),
    "fedmpq_add_errors": Prototype(c_int32, (
        Argument("other", c_void_p, "uint16"),
        Argument("count", c_int64),
        Argument("error", c_void_p, "uint16"),)),
    "fedmpq_max_pool": Prototype(c_int32, (
        Argument("pool", FedmpqPool),
        Argument("codes", FedmpqCodes),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_max_pool_backward": Prototype(c_int32, (
        Argument("pool", FedmpqPool),
        Argument("codes", FedmpqCodes),
        Argument("error", c_void_p, "uint16"),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),)),
    "fedmpq_average_pool": Prototype(c_int32, (
        Argument("pool", FedmpqPool),
        Argument("codes", FedmpqCodes),
        Argument("multipliers", c_void_p, "float32"),
        Argument("low", c_float),
        Argument("high", c_float),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_average_pool_backward": Prototype(c_int32, (
        Argument("pool", FedmpqPool),
        Argument("error", c_void_p, "uint16"),
        Argument("shares", c_void_p, "float32"),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),)),
    "fedmpq_join": Prototype(c_int32, (
        Argument("codes", FedmpqCodes),
        Argument("extent", FedmpqExtent),
        Argument("multiplier", c_float),
        Argument("low", c_float),
        Argument("high", c_float),
        Argument("start", c_int32),
        Argument("channels", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_part_errors": Prototype(c_int32, (
        Argument("error", c_void_p, "uint16"),
        Argument("extent", FedmpqExtent),
        Argument("start", c_int32),
        Argument("channels", c_int32),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),)),
    "fedmpq_rearrange": Prototype(c_int32, (
        Argument("codes", FedmpqCodes),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("from", c_void_p, "int32"),
        Argument("outs", c_int64),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint8"),)),
    "fedmpq_rearrange_backward": Prototype(c_int32, (
        Argument("error", c_void_p, "uint16"),
        Argument("images", c_int32),
        Argument("count", c_int64),
        Argument("from", c_void_p, "int32"),
        Argument("outs", c_int64),
        Argument("threads", c_int32),
        Argument("out", c_void_p, "uint16"),)),
    "fedmpq_softmax_loss": Prototype(c_int32, (
        Argument("acc", c_void_p, "int32"),
        Argument("samples", c_int32),
        Argument("classes", c_int32),
        Argument("scale", c_void_p, "float32"),
        Argument("bias", c_void_p, "float32"),
        Argument("shift", c_void_p, "float32"),
        Argument("labels", c_void_p, "int64"),
        Argument("gradient", c_void_p, "float32"),
        Argument("loss", c_void_p, "float64"),)),
    "fedmpq_sigmoid_loss": Prototype(c_int32, (
        Argument("acc", c_void_p, "int32"),
        Argument("samples", c_int32),
        Argument("outputs", c_int32),
        Argument("scale", c_void_p, "float32"),
        Argument("bias", c_void_p, "float32"),
        Argument("targets", c_void_p, "float32"),
        Argument("gradient", c_void_p, "float32"),
        Argument("loss", c_void_p, "float64"),)),
    "fedmpq_squared_loss": Prototype(c_int32, (
        Argument("acc", c_void_p, "int32"),
        Argument("samples", c_int32),
        Argument("outputs", c_int32),
        Argument("scale", c_void_p, "float32"),
        Argument("bias", c_void_p, "float32"),
        Argument("targets", c_void_p, "float32"),
        Argument("gradient", c_void_p, "float32"),
        Argument("loss", c_void_p, "float64"),)),
    "fedmpq_halve_errors": Prototype(c_int32, (
        Argument("real", c_void_p, "float32"),
        Argument("rows", c_int64),
        Argument("channels", c_int32),
        Argument("gain", c_void_p, "float32"),
        Argument("error", c_void_p, "uint16"),
        Argument("greatest", c_void_p, "float32"),)),
    "fedmpq_update_codes": Prototype(c_int32, (
        Argument("update", FedmpqUpdate),
        Argument("step_number", c_uint32),
        Argument("threads", c_int32),
        Argument("gradient", c_void_p, "float32"),
        Argument("codes", c_void_p, "uint8"),)),
    "fedmpq_function": Prototype(c_int32, (
        Argument("name", c_char_p),)),
    "fedmpq_run": Prototype(c_int32, (
        Argument("functions", c_void_p, "int32"),
        Argument("count", c_int32),
        Argument("addresses", c_void_p, "int64"),
        Argument("arguments", c_int64),
        Argument("stopped", c_void_p, "int32"),
        Argument("seconds", c_void_p, "float64"),)),
}
