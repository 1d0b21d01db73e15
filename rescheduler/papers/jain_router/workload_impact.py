r"""Workload impact: what a request costs those that it is mixed with, and they it.

Jain et al. 2025, §4.2. An instance m has requests j with :math:`p_j` prompt and :math:`d_j` decode
tokens; request i, with :math:`p_i` prompt tokens and :math:`d_i` tokens to decode, is added:

.. math:: T^m_{p_i} = grad_1 \Big(p_i^2 + \sum_j (p_j + d_j)\Big), \qquad
   r^m_{p_i} = \begin{cases} 1 & T^m_{p_i} \le \epsilon \\
   1 - T^m_{p_i} / \epsilon & \text{otherwise} \end{cases} \tag{1}

.. math:: r^m_d = -grad_2 \Big(\sum_j (p_j + d_j) + p_i + d_i\Big) \tag{2}

.. math:: r_{mixing} = \alpha\, r^m_{p_i} + (1 - \alpha)\, r^m_d, \qquad
   h = r^m_{mixing} - \max_l r^l_{mixing} \tag{4}

Both readings of equation 2 are possible as it is printed: the sum's bracket ends before
:math:`p_i + d_i`, so that these would be *added* as whole tokens, thousands of times the rest; here
the gradient applies to all. The sum is the KV load of the instance, prompts of requests that it has
not begun included: the paper bounds the terms "when there are no requests waiting at the model
instance", so that those which wait count beyond. :math:`\epsilon` is not published.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core

V100_GRADIENTS = (3.2e-4, 3.3e-5)
"""grad1 and grad2 of Llama-2-7B on a V100, seconds a token (§3)."""


class ImpactRules(NamedTuple):
    r"""The constants of equations 1 and 2.

    Attributes:
        prompt_gradient: :math:`grad_1`, seconds a prompt token.
        decode_gradient: :math:`grad_2`, seconds a token of context.
        balance: :math:`\alpha` in (0, 1), how much of the whole the prompt phase is.
        tolerance: :math:`\epsilon`, seconds of impact on a prompt that cost nothing.
    """

    prompt_gradient: float = V100_GRADIENTS[0]
    decode_gradient: float = V100_GRADIENTS[1]
    balance: float = 0.5
    tolerance: float = 2.0


@compiled_core
def prompt_impact(rules: ImpactRules, there: float, prompt: float) -> float:
    r"""Return :math:`r^m_{p_i}` of equation 1, with :math:`\sum_j (p_j + d_j)` tokens there."""
    seconds = rules.prompt_gradient * (prompt * prompt + there)
    if seconds <= rules.tolerance:
        return 1.0
    return 1.0 - seconds / rules.tolerance


@compiled_core
def decode_impact(rules: ImpactRules, there: float, prompt: float, output: float) -> float:
    r"""Return :math:`r^m_d` of equation 2, with :math:`\sum_j (p_j + d_j)` tokens there."""
    return -rules.decode_gradient * (there + prompt + output)


@compiled_core
def mixing(rules: ImpactRules, there: float, prompt: float, output: float) -> float:
    """Return r_mixing of adding a request to an instance; higher is better."""
    on_prompt = prompt_impact(rules, there, prompt)
    on_decode = decode_impact(rules, there, prompt, output)
    return rules.balance * on_prompt + (1.0 - rules.balance) * on_decode


@compiled_core
def guidance(
    rules: ImpactRules, load: npt.NDArray[np.int64], prompt: float, output: float, g: int
) -> float:
    """Return h of equation 4 for instance g: 0 where the impact is least, else below.

    To wait counts as to go where the impact is greatest. The paper does not say; were it 0, or as
    good as the best instance, a router that learns to follow h would learn to wait forever.

    Args:
        rules: the constants.
        load: [G] tokens of the requests on each instance.
        prompt: tokens of the prompt that comes.
        output: tokens it is expected to decode.
        g: instance that it goes to; below 0 if it waits.
    """
    best = worst = mixing(rules, load[0], prompt, output)
    for other in range(1, len(load)):
        there = mixing(rules, load[other], prompt, output)
        best = max(best, there)
        worst = min(worst, there)
    return (worst if g < 0 else mixing(rules, load[g], prompt, output)) - best
