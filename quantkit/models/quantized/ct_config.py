"""compressed-tensors' quantization_config: what a scheme is called there, and which layer has it.

One table serves both directions, so that what is written is what is read. The library's pydantic
models would also parse it, but they import torch and refuse fields of other versions; the tests
hold this table against them.

Source: compressed-tensors 0.20.1, `quantization/` (`quant_args.py`, `quant_scheme.py`) and
`utils/match.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.quantized.layout import Config
from quantkit.models.quantized.patterns import compile_pattern

METHOD = "compressed-tensors"
MIXED = "mixed-precision"
LINEAR = "Linear"

E4M3, UINT8 = "torch.float8_e4m3fn", "torch.uint8"

Scheme = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Args:
    """How one tensor is quantized, as the library's `QuantizationArgs` says it.

    Always float and symmetric. scale_dtype is a note to the library's compressor: it does not tell
    schemes apart, since MX scales are recognised by what is in the file.
    """

    num_bits: int
    strategy: str
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | str = False
    scale_dtype: str | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The fields that the library itself writes; the others it leaves to their defaults."""
        fields: dict[str, Any] = {
            "num_bits": self.num_bits,
            "type": "float",
            "symmetric": True,
            "group_size": self.group_size,
            "strategy": self.strategy,
            "dynamic": self.dynamic,
        }
        if self.block_structure is not None:
            fields["block_structure"] = list(self.block_structure)
        if self.scale_dtype is not None:
            fields["scale_dtype"] = self.scale_dtype
        return fields


WEIGHTS: Mapping[str, Args] = {
    "nvfp4": Args(4, "tensor_group", 16, scale_dtype=E4M3),
    "mxfp4": Args(4, "group", 32, scale_dtype=UINT8),
    "mxfp8": Args(8, "group", 32, scale_dtype=UINT8),
    "fp8": Args(8, "tensor"),
    "fp8_channel": Args(8, "channel"),
    "fp8_block": Args(8, "block", block_structure=(128, 128)),
}
# "local": block scales at run time under a static tensor scale.
INPUTS: Mapping[str, Args] = {
    "nvfp4": Args(4, "tensor_group", 16, dynamic="local", scale_dtype=E4M3),
    "mxfp4": Args(4, "group", 32, dynamic=True, scale_dtype=UINT8),
    "mxfp8": Args(8, "group", 32, dynamic=True, scale_dtype=UINT8),
    "fp8": Args(8, "tensor"),
    "fp8_channel": Args(8, "token", dynamic=True),
    "fp8_group": Args(8, "group", 128, dynamic=True),
}


def format_name(scheme: Scheme) -> str:
    """The library's name of how a scheme's weight is stored.

    FP8 has two that store the same: what the library infers with and without an input format.
    """
    weight, activation = scheme
    if weight in ("nvfp4", "mxfp4"):
        return f"{weight}-pack-quantized"
    if weight == "mxfp8":
        return "mxfp8-quantized"
    return "naive-quantized" if activation is None else "float-quantized"


@dataclass(frozen=True, slots=True)
class Group:
    """One of `config_groups`. scheme is None where quantkit cannot say it; then `reason` says why.

    A group that cannot be read is an error for its layers only: kept out of a checkpoint of many
    groups until a layer asks for it.
    """

    name: str
    targets: tuple[str, ...]
    scheme: Scheme | None
    reason: str = ""


def settings(config: Config) -> Mapping[str, Any] | None:
    """The quantization_config of a config.json when it is compressed-tensors', else None.

    Models with several towers may keep it in their text_config; `compression_config` is its old
    name.
    """
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            found = holder.get(key)
            if isinstance(found, Mapping) and found.get("quant_method") == METHOD:
                return found
    return None


def read_groups(quantization: Mapping[str, Any]) -> list[Group]:
    """The groups of a quantization_config.

    Raises QuantkitError for what changes every weight of the file: sparsity, transforms, a
    checkpoint that was never compressed.
    """
    sparsity = quantization.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise QuantkitError(
            f"quantization_config has sparsity_config {sparsity.get('format')!r}; quantkit reads "
            "dense weights, decompress the model first"
        )
    if quantization.get("transform_config"):
        raise QuantkitError(
            "quantization_config has a transform_config: the weights are rotated and the runtime "
            "has to undo it, which no other layout says; start from the original model"
        )
    status = quantization.get("quantization_status", "compressed")
    if status != "compressed":
        raise QuantkitError(
            f"quantization_config has quantization_status {status!r}: the weights are not "
            "compressed; save the model with save_compressed=True"
        )
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise QuantkitError(f"quantization_config has no config_groups ({groups!r})")
    outer = quantization.get("format")
    return [_read_group(str(name), group, outer) for name, group in groups.items()]


def _read_group(name: str, group: object, outer: object) -> Group:
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        raise QuantkitError(
            f"quantization_config: group {name!r} is not an object with targets ({group!r:.80})"
        )
    targets = tuple(str(target) for target in group["targets"])
    form = group.get("format") or (None if outer == MIXED else outer)
    try:
        if group.get("output_activations") is not None:
            raise QuantkitError("it quantizes outputs, which quantkit does not")
        weight = _find(group.get("weights"), WEIGHTS, "weights", form)
        inputs = group.get("input_activations")
        activation = None if inputs is None else _find(inputs, INPUTS, "inputs", form)
    except QuantkitError as error:
        return Group(name, targets, None, str(error))
    return Group(name, targets, (weight, activation))


def _find(raw: object, table: Mapping[str, Args], what: str, form: object) -> str:
    """The row of a table that says what `raw` says; QuantkitError without a layer's name."""
    if not isinstance(raw, Mapping):
        raise QuantkitError(f"it does not say how {what} are quantized")
    bits, kind = raw.get("num_bits", 8), str(raw.get("type", "int")).lower()
    if kind != "float":
        raise QuantkitError(f"{what} are {kind}{bits} ({form}), and int4/int8 is not FP4/FP8")
    if raw.get("actorder") in (True, "group", "dynamic"):
        raise QuantkitError(f"{what} have actorder {raw['actorder']!r}: their columns are permuted")
    if raw.get("symmetric", True) is not True:
        raise QuantkitError(f"{what} are asymmetric; FP4 and FP8 have no zero point here")
    args = _read_args(raw)
    for name, known in table.items():
        if args == known:
            return name
    raise QuantkitError(
        f"{what} have num_bits {bits}, strategy {args.strategy!r}, group_size {args.group_size}, "
        f"block_structure {args.block_structure}, dynamic {args.dynamic!r}; "
        f"readable are {', '.join(table)}"
    )


def _read_args(raw: Mapping[str, Any]) -> Args:
    """Fields as they are compared: defaults filled in, the older spellings made the newer ones."""
    size = raw.get("group_size")
    strategy = raw.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    block = raw.get("block_structure")
    if isinstance(block, str):
        block = [int(side) if side.isdigit() else side for side in block.split("x")]
    return Args(
        num_bits=raw.get("num_bits", 8),
        strategy=str(strategy).lower(),
        group_size=None if size == -1 else size,
        block_structure=tuple(block) if isinstance(block, list) else None,
        dynamic=raw.get("dynamic", False),
    )


def matcher(quantization: Mapping[str, Any]) -> Callable[[str], Scheme]:
    """layer name -> the scheme of the group whose targets name it.

    As the library does: an exact name before a pattern before a class. The class of a module is
    not in a checkpoint, so any class stands for all layers that nothing else names; and where
    there is one group only, a name it does not know is taken for another spelling of one it does
    (module names and checkpoint names can differ by a prefix).

    Raises QuantkitError, from the function, for a layer that is ignored, that no group names, or
    whose group cannot be read.
    """
    groups = read_groups(quantization)
    by_target = {target: group for group in groups for target in group.targets}
    patterns = [
        (compile_pattern(target), by_target[target]) for target in sorted(by_target) if _re(target)
    ]
    classes = [by_target[target] for target in sorted(by_target) if target[:1].isupper()]
    listed = quantization.get("ignore") or ()
    ignore = [str(entry) for entry in listed] if isinstance(listed, list) else [str(listed)]
    ignored = frozenset(ignore), [compile_pattern(entry) for entry in ignore if _re(entry)]

    def find(name: str) -> Scheme:
        if name in ignored[0] or any(pattern.match(name) for pattern in ignored[1]):
            raise QuantkitError(
                f"{name} has quantized tensors, and quantization_config has it in `ignore`; one "
                "of the two is wrong"
            )
        named = [group for pattern, group in patterns if pattern.match(name)]
        group = by_target.get(name) or next(iter(named + classes), None)
        if group is None and len(groups) == 1:
            group = groups[0]
        if group is None:
            raise QuantkitError(
                f"{name} has quantized tensors, and no group of quantization_config names it "
                f"(targets: {', '.join(list(by_target)[:4])} ...)"
            )
        if group.scheme is None:
            raise QuantkitError(
                f"{name}: config group {group.name!r} cannot be read: {group.reason}; start from "
                "the original model"
            )
        return group.scheme

    return find


def _re(target: str) -> bool:
    return target.startswith("re:")
