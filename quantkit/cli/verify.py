"""quantkit verify: is the export right, and what did quantization cost?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import options as opt
from quantkit.cli.artefact import find_folder
from quantkit.cli.console import Console, format_table

if TYPE_CHECKING:
    from quantkit.evaluate.graph import GraphVerification


def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A folder that quantkit export wrote.", show_default=False
        ),
    ],
    model: opt.Original = None,
    calibration: opt.CalibrationData = None,
    limit: opt.Limit = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Prove the export right; say what it cost.

    A graph runs on ONNX Runtime's CPU provider and is compared with the fake-quantized PyTorch
    model, which it must equal, and with the original model on data that calibration did not see. A
    checkpoint is read back and compared with what its plan makes of the original, byte for byte.
    Exits 1 when it is not what it should be.
    """
    console = Console(json=json, verbosity=verbose - quiet)
    folder = find_folder(folder)
    from quantkit.evaluate.checkpoint import CheckpointVerification
    from quantkit.evaluate.verify import verify as run
    from quantkit.manifest import model_key, write_json

    result = run(
        folder, model=model, calibration=calibration, limit=limit, progress=console.progress
    )
    content = result.to_json() | {"content_key": model_key(folder)}
    write_json(folder / "verify.json", content)
    if isinstance(result, CheckpointVerification):
        from quantkit.cli.verify_checkpoint import describe_checkpoint

        console.result(content, describe_checkpoint(result, folder))
    else:
        console.result(content, describe_graph(result, content))
    if not result.passed:
        console.next("quantkit", "report", folder)
        raise typer.Exit(1)
    ends = isinstance(result, CheckpointVerification)
    console.next("quantkit", "report" if ends else "build", folder)


def describe_graph(result: GraphVerification, content: Mapping[str, Any]) -> str:
    """Weights, layers and outputs against the model, the cost of quantization, and what failed.

    content: of verify.json.
    """
    layers, weights, kept = content["layers"], content["weights"], content["kept"]
    plain, quantized = (result.worst(input_quantizers=each) for each in (False, True))
    lines = [
        f"weights: {weights['identical']}/{weights['checked']} identical to the plan, "
        f"{kept['identical']}/{kept['checked']} kept tensors to the model",
        f"layers fed identical inputs: {layers['passed']}/{layers['checked']} agree, worst "
        f"{layers['worst_relative_l2']:.1e}",
        f"outputs at {len(result.runs) // 2} shapes: worst relative L2 {plain['relative_l2']:.1e} "
        f"with float inputs, {quantized['relative_l2']:.1e} with quantized ones "
        f"(within {quantized['tolerance']:.1e}; {layers['flipped_codes']} of {layers['codes']} "
        "input codes next to a rounding tie flipped)",
        "",
        f"cost of quantization on {content['cost']['data']['description']}:",
        format_table(
            ("output", "relative L2", "cosine", "SQNR", "norm ratio"),
            [
                (
                    output["name"],
                    f"{output['relative_l2']:.4f}",
                    f"{output['cosine']:.5f}",
                    f"{output['sqnr_db']:.1f} dB",
                    f"{output['norm_ratio']:.4f}",
                )
                for output in result.outputs
            ],
        ),
        "worst layers: "
        + ", ".join(f"{c['layer']} {c['relative_l2']:.3f}" for c in result.worst_layers[:3]),
        "",
        "verified: the graph is the fake-quantized model"
        if result.passed
        else "FAILED: the graph differs from the fake-quantized model (see verify.json)",
        *list_failures(content),
    ]
    return "\n".join(lines)


def list_failures(content: Mapping[str, Any]) -> list[str]:
    """Which weights, layers and outputs failed, by name; nothing when none did."""
    failed = {
        "weights": content["weights"]["different"] + content["kept"]["different"],
        "layers": [row["layer"] for row in content["layers"]["rows"] if not row["passed"]],
        "outputs": [
            output["name"]
            for run in content["runs"]
            for output in run["outputs"]
            if not output["passed"]
        ],
    }
    return [
        f"  {what}: {', '.join(dict.fromkeys(names))}" for what, names in failed.items() if names
    ]
