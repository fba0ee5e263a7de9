"""Which tokens each query attends to: index scores, and a running top-k over streamed blocks of index keys."""

from longstraw.kernels.selection.scores import index_scores
from longstraw.kernels.selection.topk import NOT_SELECTED, RunningTopK

__all__ = ["NOT_SELECTED", "RunningTopK", "index_scores"]
