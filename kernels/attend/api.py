"""The public attention call and the question whether it would be served."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .. import ops
from ..arch import family
from ..dispatch import AUTO, choose, implementation_names
from ..errors import InvalidArgument, UnsupportedCall
from .settings import LAYOUTS, check_choice, check_settings, resolve
from .validation import check_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mode: str = "auto",
    grouping=None,
    scale: float | None = None,
    layout: str = "BHSD",
    implementation: str = "auto",
    qk_format: str = "auto",
    probabilities: str = "auto",
    demean: bool = True,
    own_block: bool = True,
) -> Tensor:
    """Full, non-causal low-bit attention: ``softmax(scale q k^T) v``. For inference; no gradient is defined.

    Args:
        q: [B, H, S_q, D] or, with layout "BSHD", [B, S_q, H, D]; bf16, fp16 or fp32; any strides, any length from 1.
        k, v: the same with S_kv tokens, q's dtype and device.
        mode: "8-bit" (fast), "8-bit precise" (a quarter of its error at 0.65 of its speed), "4-bit" or "auto" (by q's
            device, never precise; 8-bit where the device has no mode of its own).
        grouping: a Grouping from ``group_values`` for these tokens; None keeps tokens in sequence order, as the precise
            mode does anyway.
        scale: softmax scale, ``D ** -0.5`` by default.
        layout: "BHSD" or "BSHD", of all three inputs and of the output.
        implementation: "auto" (a GPU kernel for q's device) or a name; a named one never falls back.
        qk_format: "int8" or "e4m3" in 8-bit mode; "auto" is int8 except on B200 and B300, whose tensor cores lack it.
        probabilities: "expcast" or "exp2" in 8-bit mode; "auto" is ExpCast except on sm_89, sm_120 and sm_121. The
            precise mode has one choice of both: "int8" and "exp2".
        demean: remove 128-token block means of v before quantization and restore them from the row sums; the precise
            mode does not quantize v.
        own_block: in 4-bit mode, where S_q == S_kv > 128, attend to the 128 keys of each query's own block in 16 bit;
            the other modes have no such part.

    Returns:
        Contiguous tensor of q's shape and dtype.

    Raises:
        InvalidArgument: an argument is wrong in itself.
        UnsupportedCall: no implementation serves the call, with a reason per implementation.
    """
    check_settings(mode, qk_format, probabilities)
    check_choice("implementation", implementation, implementation_names())
    check_choice("demean", demean, (True, False))
    check_choice("own_block", own_block, (True, False))
    check_attention(q, k, v, layout, scale, grouping)
    return ops.call_operator(
        ops.attention_operator,
        q,
        k,
        v,
        None if grouping is None else grouping.permutation,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        layout,
        mode,
        qk_format,
        probabilities,
        demean,
        own_block,
        implementation,
    )


@dataclass(frozen=True)
class Support:
    """Whether a call would be served, and by what. True in a condition when it would.

    Attributes:
        implementation, mode: what would serve it; None when nothing would.
        reasons: one sentence per implementation that would not.
    """

    implementation: str | None
    mode: str | None
    reasons: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.implementation is not None

    @property
    def why(self) -> str:
        """The reasons as one sentence; empty when the call is served."""
        return "; ".join(reason if name == AUTO else f"{name} {reason}" for name, reason in self.reasons.items())


def support(
    q: Tensor, k: Tensor, v: Tensor, *, mode: str = "auto", implementation: str = "auto", layout: str = "BHSD"
) -> Support:
    """Ask whether ``attention`` would serve a call. Looks at shapes, dtypes and devices, not at values.

    Raises:
        InvalidArgument: mode, implementation or layout is not one of the choices. Tensors never raise.
        torch.OutOfMemoryError: no room for the test of a kernel that runs on the first question; ask again later.
    """
    check_settings(mode, AUTO, AUTO)
    check_choice("implementation", implementation, implementation_names())
    check_choice("layout", layout, LAYOUTS)
    try:
        check_attention(q, k, v, layout, None, None)
        name = family(q.device)
        settings = resolve(mode, AUTO, AUTO, True, name)
        row = choose(ops.describe(q, k, layout, settings, name), implementation, q.device)
    except InvalidArgument as error:
        return Support(None, None, {AUTO: str(error)})
    except UnsupportedCall as error:
        return Support(None, None, error.reasons)
    return Support(row.name, settings.mode)
