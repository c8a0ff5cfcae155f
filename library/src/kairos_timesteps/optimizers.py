"""Adam and AdamW of torch, without the import of torch's compiler, which takes 2 s of CPU time and 250 MB of memory.

The methods of torch's optimizers have wrappers for the compiler, which import it at their first call even if nothing is
compiled. The classes here call the wrapped functions, so their results equal those of torch's classes to the bit.
"""

import inspect

import torch
from torch.optim import Optimizer


class _WithoutWrappers:
    """Methods of torch's optimizers without their wrappers; a base class to list before torch's class."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class Adam(_WithoutWrappers, torch.optim.Adam):
    """Adam (Kingma and Ba 2015)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))  # no_grad replaces what torch's wrapper does


class AdamW(_WithoutWrappers, torch.optim.AdamW):
    """AdamW, Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
