"""Options that several commands share, spelled once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A transformers or diffusers folder, file.py:function, or a hub id.",
        show_default=False,
    ),
]
Artefact = Annotated[
    Path,
    typer.Argument(
        metavar="ARTEFACT",
        help="A folder that quantkit wrote, or an .onnx file.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FOLDER", help="Folder to write.", show_default=False),
]
Original = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Where the original model is now, if it moved.",
        show_default=False,
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="Built-in recipe or YAML file (see `quantkit inspect --recipes`).",
        show_default=False,
    ),
]
Fp4 = Annotated[
    bool, typer.Option("--fp4", help="NVFP4, by the recipe that suits the model's class.")
]
Fp8 = Annotated[
    bool, typer.Option("--fp8", help="FP8, by the recipe that suits the model's class.")
]
CalibrationData = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="DATA",
        help="Text or .jsonl file, folder of images, .npz or .safetensors of inputs. "
        "Default: sample data for the model's task.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        metavar="N",
        help="Use at most this many samples.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Where calibration runs: cpu or cuda.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan and the sizes; read no weights.")
]
Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say only the result and warnings.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that quantkit wrote before.")
]


Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[:SCALE]",
        help="Merge a LoRA (peft, diffusers or kohya) before quantizing; may be given again.",
        show_default=False,
    ),
]


class ComputeDtype(StrEnum):
    """What the operators between the quantized matmuls compute in."""

    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


ComputeDtypeOption = Annotated[
    ComputeDtype,
    typer.Option("--compute-dtype", help="Dtype of everything that is not quantized."),
]
