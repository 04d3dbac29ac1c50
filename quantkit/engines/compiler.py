"""One compilation: parse, configure, compile into a file. The only code that talks to TensorRT.

The compiler runs in a thread, because Python delivers an interrupt between two of its own steps
and a compilation is minutes inside one C++ call: the main thread waits in Python, hears Ctrl-C,
and tells the compiler to stop at its next progress step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import onnx
from onnx import TensorProto

from quantkit.engines.runtime import Runtime
from quantkit.engines.shapes import Profile
from quantkit.errors import QuantkitError

_STEPS = 1000
_NARROW_TYPES = {
    "FLOAT": TensorProto.FLOAT,
    "HALF": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """What TensorRT said when it refused a model. layer: ONNX node, "" when it named none."""

    stage: str
    layer: str
    operator: str
    sentence: str


class RefusedError(Exception):
    """TensorRT refused the model; the caller turns the refusals into one sentence for the user."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__(refusals)
        self.refusals = refusals


@dataclass(slots=True)
class _Journal:
    """What TensorRT logged at warning level and above."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def compile_engine(
    runtime: Runtime,
    trt: Any,
    onnx_path: Path,
    part: Path,
    *,
    targets: Sequence[str],
    profiles: Sequence[Profile],
    output_types: Mapping[str, int],
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    """Compile `onnx_path` into the file `part`; TensorRT's warnings are returned.

    External data is mapped by the parser and the engine is streamed to disk, so neither is held in
    memory. output_types: ONNX element type that each output is declared with; an engine that would
    give another type is refused before it is compiled. Raises RefusedError, QuantkitError,
    KeyboardInterrupt.
    """
    logger = _logger(trt)
    logger.journal = journal = _Journal()
    builder = trt.Builder(logger)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    runtime.select(trt, config, targets)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):
        raise RefusedError(_parse_refusals(parser))
    _check_outputs(network, output_types, onnx_path)
    for profile in profiles:
        _add_profile(builder, config, profile)
    stop = Event()
    config.progress_monitor = monitor = _monitor(trt, stop, progress)
    try:
        with part.open("wb") as file:
            writer = _writer(trt, file)
            done = _run(
                lambda: builder.build_serialized_network_to_stream(network, config, writer), stop
            )
            if writer.failure is not None:
                raise writer.failure
    except OSError as error:
        raise QuantkitError(f"{part.parent}: cannot write the engine: {error.strerror}") from None
    if monitor.failure is not None:
        raise monitor.failure
    if not done:
        raise RefusedError([_build_refusal(journal)])
    if progress is not None:
        progress(_STEPS, _STEPS)
    return journal.warnings


def _run(build: Callable[[], bool], stop: Event) -> bool:
    with ThreadPoolExecutor(1, "compiler") as pool:
        future = pool.submit(build)
        try:
            return future.result()
        except BaseException:
            stop.set()
            raise


def _check_outputs(network: Any, declared: Mapping[str, int], onnx_path: Path) -> None:
    """DequantizeLinear gives the type of its scale, whatever the file declares for its outputs."""
    for index in range(network.num_outputs):
        tensor = network.get_output(index)
        real = _NARROW_TYPES.get(str(tensor.dtype).rsplit(".", 1)[-1])
        asked = declared.get(tensor.name)
        if real is None or asked is None or real == asked:
            continue
        raise QuantkitError(
            f"{onnx_path}: output {tensor.name!r} is declared {_type_name(asked)} but the engine "
            f"would give {_type_name(real)}, the type of a scale behind it; cast both operands of "
            "that layer to the compute type, or make the scales of that type"
        )


def _add_profile(builder: Any, config: Any, profile: Profile) -> None:
    if not profile:
        return
    entry = builder.create_optimization_profile()
    for name, shape in profile.items():
        entry.set_shape(name, shape.min, shape.opt, shape.max)
    config.add_optimization_profile(entry)


def _type_name(element: int) -> str:
    return str(onnx.TensorProto.DataType.Name(element)).lower()


# Subclasses of a module that is only known at run time: hence classes made inside functions. No
# exception may pass through C++, so each keeps its own as `failure`.


@functools.cache
def _logger(trt: Any) -> Any:
    """The one logger of this process: TensorRT keeps the first it is given and ignores others."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.journal = _Journal()

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.journal.errors.append(message)
            elif severity == trt.ILogger.Severity.WARNING:
                self.journal.warnings.append(message.strip())

    return Logger()


def _writer(trt: Any, file: Any) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

            self.failure: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return int(file.write(data))
            except OSError as error:
                self.failure = error
                return 0

    return Writer()


def _monitor(trt: Any, stop: Event, progress: Callable[[int, int], None] | None) -> Any:
    """Turns nested phases into one rising number; stops the compiler when asked to."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.failure: BaseException | None = None
            self.phases: dict[str, tuple[float, float, int]] = {}
            self.done = 0

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            start, span, _ = self.phases.get(parent or "", (0.0, 1.0, 1))
            if parent in self.phases:
                span /= max(self.phases[parent][2], 1)
            self.phases[name] = (start, span, steps)

        def step_complete(self, name: str, step: int) -> bool:
            start, span, steps = self.phases.get(name, (0.0, 0.0, 1))
            width = span / max(steps, 1)
            # The start of a phase moves on with its steps: a nested phase begins there.
            self.phases[name] = (start + width, span, steps)
            self.report(start + width)
            return not stop.is_set() and self.failure is None

        def phase_finish(self, name: str) -> None:
            self.phases.pop(name, None)

        def report(self, fraction: float) -> None:
            done = min(int(fraction * _STEPS), _STEPS)
            if progress is None or done <= self.done:
                return
            self.done = done
            try:
                progress(done, _STEPS)
            except BaseException as error:
                self.failure = error

    return Monitor()


# Where the sentence for people starts in TensorRT's three kinds of message, tried in this order.
_TAIL = r"(?P<sentence>.+?)(?: \(See .*| In \w+ at .*|\)?$)"
_SENTENCES = (
    re.compile(rf"Error is:\s*{_TAIL}", re.DOTALL),
    re.compile(rf"CHECK\w*\(.*?\) failed\.\s*(?:LHS: \d+\s*RHS: \d+\s*)?{_TAIL}", re.DOTALL),
    re.compile(rf"Assertion failed: .*?: {_TAIL}", re.DOTALL),
    re.compile(rf"Error Code \d+: [\w ]+ \({_TAIL}", re.DOTALL),
)


def _parse_refusals(parser: Any) -> list[Refusal]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [Refusal("parse", e.node_name(), e.node_operator(), _sentence(e.desc())) for e in errors]


def _build_refusal(journal: _Journal) -> Refusal:
    text = journal.errors[0] if journal.errors else "the compiler gave no reason"
    return Refusal("build", "", "", _sentence(text))


def _sentence(text: str) -> str:
    """The part of a TensorRT message that a user can act on, on one line."""
    matches = (pattern.search(text) for pattern in _SENTENCES)
    found = next((match["sentence"] for match in matches if match), text)
    return " ".join(found.split()).rstrip(".")
