"""The optimizers of cases: torch's, and two of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.records import Case


def build_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the case's optimizer over `parameters`."""
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adamw_tensor_lr": adamw_tensor_lr,
        "adam_in_float32": AdamInFloat32,
        "lars": Lars,
        "nadam": torch.optim.NAdam,
    }
    return makers[case.optimizer.name](list(parameters), **case.optimizer.arguments)


def adamw_tensor_lr(parameters: list[nn.Parameter], lr: float, **options: Any) -> torch.optim.AdamW:
    """Return AdamW with its learning rate in a tensor, as users have it whose optimizer is compiled or captured in a graph."""
    return torch.optim.AdamW(parameters, torch.tensor(lr), **options)


class Lars(torch.optim.Optimizer):
    """Steps each parameter by its own norm (You et al., "Large Batch Training of Convolutional Networks", algorithm 1).

    Args:
        params: As for every optimizer of torch.
        lr: Length of a step as a share of the parameter's norm.
    """

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # The sum keeps a gradient of zeros from a division by zero.
                    ratio = parameter.norm() / (parameter.grad.norm() + 1e-3)
                    parameter.sub_(group["lr"] * ratio * parameter.grad)


MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamInFloat32(torch.optim.Optimizer):
    """Adam that computes in float32, and keeps its moments there, whatever the dtype of the parameters.

    Args:
        params: As for every optimizer of torch.
        lr: Learning rate.
        betas: Betas of the two moments.
        eps: Added to the root of the second one.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad.float(), group)

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
        state["step"] += 1
        done, (first, second) = float(state["step"]), (state[name] for name in MOMENTS)
        first.mul_(group["betas"][0]).add_(gradient, alpha=1 - group["betas"][0])
        second.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
        mean, square = (m / (1 - beta**done) for m, beta in zip((first, second), group["betas"]))
        parameter.copy_(parameter.float() - group["lr"] * mean / (square.sqrt() + group["eps"]))

    def load_state_dict(self, state_dict: Any) -> None:
        """Load as every optimizer does, and keep the moments' dtype."""
        super().load_state_dict(state_dict)
        places = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(places, parameters, strict=True):
            for name in MOMENTS:
                if name in state_dict["state"].get(index, {}):
                    self.state[parameter][name] = state_dict["state"][index][name].detach().clone()
