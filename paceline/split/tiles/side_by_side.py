"""Images are laid out with the channels of a pixel side by side, where a convolution is quicker on them.

torch's kernels look at channels side by side in any case. They lay out planes anew for every convolution, and one of
few channels takes several times as long on planes; max pooling too. But then the kernel has to be laid out anew, which
is the more work where it has more numbers than the image: deep in a network images lie as planes again.

Nothing shows it: what is gathered for a user's own code lies as planes. Where how images lie would change what comes
out (dropout draws a number for each element in the order in which they lie; a view may not be possible), or where
something would lay them out anew every time, they stay as they are. The run that shows what the model does finds out.
"""

from __future__ import annotations

import torch

from paceline.memory.channels_last import channels_are_last


class SideBySide:
    """Whether images of a model may be laid out anew."""

    def __init__(self) -> None:
        self.allowed = True

    def for_convolution(self, x: torch.Tensor, numbers: int, kernel: torch.Tensor) -> torch.Tensor:
        """Returns `x`, of whose image each device has so many numbers, as it is to lie for its convolution."""
        if not self.allowed or x.dim() != 4 or x.device.type != "cpu" or not x.is_floating_point():
            return x
        if numbers < kernel.numel():
            return x.contiguous()
        return x if channels_are_last(x) else x.contiguous(memory_format=torch.channels_last)

    def for_users(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, which is whole, as users may see it."""
        return x.contiguous() if self.allowed else x
