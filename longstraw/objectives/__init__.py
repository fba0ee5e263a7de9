"""Group losses over lists of per-token log-probs, called once a lane: the lanes' losses sum to the
group's."""

from longstraw.objectives.advantages import centered_advantages, leave_one_out_advantages, zscore_advantages
from longstraw.objectives.cispo import cispo_loss
from longstraw.objectives.clipping import Clip
from longstraw.objectives.dapo import dapo_loss, overlong_penalty
from longstraw.objectives.dpo import PreferenceLoss, PreferenceMetrics, PreferenceObjective, dpo_loss
from longstraw.objectives.entropy import entropy_bonus
from longstraw.objectives.grpo import dr_grpo_loss, grpo_loss
from longstraw.objectives.gspo import gspo_loss
from longstraw.objectives.kl import KLEstimator, KLPenalty, kl_estimate
from longstraw.objectives.metrics import PolicyMetrics, PolicyObjective
from longstraw.objectives.ranks import size_over_ranks
from longstraw.objectives.size import Aggregation, GroupSize, aggregate

__all__ = [
    "Aggregation",
    "Clip",
    "GroupSize",
    "KLEstimator",
    "KLPenalty",
    "PolicyMetrics",
    "PolicyObjective",
    "PreferenceLoss",
    "PreferenceMetrics",
    "PreferenceObjective",
    "aggregate",
    "centered_advantages",
    "cispo_loss",
    "dapo_loss",
    "dpo_loss",
    "dr_grpo_loss",
    "entropy_bonus",
    "grpo_loss",
    "gspo_loss",
    "kl_estimate",
    "leave_one_out_advantages",
    "overlong_penalty",
    "size_over_ranks",
    "zscore_advantages",
]
