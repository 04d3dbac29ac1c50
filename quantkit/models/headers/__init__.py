"""Layer facts from the headers of a checkpoint: `describe_headers`. No torch."""

from quantkit.models.headers.describe import Headers, describe_headers
from quantkit.models.headers.place import Place, read_place

__all__ = ["Headers", "Place", "describe_headers", "read_place"]
