"""How evenly routers spread tokens over experts: the load balancing loss of Switch Transformers, cut into passes."""

from longstraw.kernels.balance.gradient import GradientSource, probability_gradient, with_gradient
from longstraw.kernels.balance.use import ExpertUse, expert_use

__all__ = ["ExpertUse", "GradientSource", "expert_use", "probability_gradient", "with_gradient"]
