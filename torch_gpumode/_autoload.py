"""Makes the backend "gpumode" known to torch.distributed, without an import by the user.

Both entry-point groups name `register`. `torch.backends` runs it in the last lines of every
`import torch`, in programs that have nothing to do with us: so it must not fail, warn at most, and
cost next to nothing. The extension is loaded when the first group is made.
"""

import contextlib
import warnings
from typing import Any


def register() -> None:
    """Registers the backend, if torch has torch.distributed. May be called more than once."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or "gpumode" in dist.Backend.backend_list:
            return
        dist.Backend.register_backend(
            "gpumode", _create, extended_api=True, devices=["cpu", "cuda"]
        )
    except Exception as error:
        with contextlib.suppress(Warning):  # `python -W error` makes exceptions of warnings
            warnings.warn(
                f"torch_gpumode could not register its backend with this torch: {error!r}. "
                f'"python -m torch_gpumode env" says more.',
                RuntimeWarning,
                stacklevel=2,
            )


def _create(dist_opts: Any, pg_options: Any) -> Any:
    from torch_gpumode.distributed import _backend

    return _backend.create(dist_opts, pg_options)
