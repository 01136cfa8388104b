"""Whether torch.compile has looked into an instrumented forward: it would bake one of the two passes into its graph."""

import torch

_traced: list[bool] = []


@torch.compiler.assume_constant_result
def note_tracing() -> None:
    """Called while torch.compile traces an instrumented forward: Python runs this then, and only then.

    An exception there would only end the tracing; the next norm pass raises instead. It is noted for the whole process,
    because a traced graph may serve another model of the same classes.
    """
    _traced.append(True)


def was_traced() -> bool:
    """Whether torch.compile has looked into an instrumented forward of this process."""
    return bool(_traced)


def forget_tracing() -> None:
    """Drop every compiled graph, so that compiling again is seen again."""
    if _traced:
        torch.compiler.reset()
        _traced.clear()
