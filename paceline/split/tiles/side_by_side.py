"""Images are laid out with the channels of a pixel side by side, where a convolution is quicker on them.

torch's kernels look at channels side by side in any case. They lay out planes anew for every convolution, and one of
few channels takes several times as long on planes; max pooling too. But then the kernel has to be laid out anew, which
is the more work where it has more numbers than the image: from there on, deep in a network, images lie as planes again.

Nothing shows it: what is gathered for a user's own code lies as planes. Where how images lie would change what comes
out (dropout draws a number for each element in the order in which they lie; a view may not be possible, or be a copy),
where a user lays them out himself, or where something would lay them out anew every time, they stay as they are. The
run that shows what the model does finds out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.memory.channels_last import channels_are_last


class HowImagesLie:
    """Whether images of a model may be laid out anew, and in this forward still are."""

    def __init__(self) -> None:
        self.allowed = True
        self._as_planes = False

    def begin(self) -> None:
        """A forward begins."""
        self._as_planes = False

    def for_convolution(self, x: torch.Tensor, numbers: int, kernel: torch.Tensor) -> torch.Tensor:
        """Returns `x`, of whose image each device has so many numbers, as it is to lie for its convolution."""
        if not self.allowed or x.dim() != 4 or x.device.type != "cpu" or not x.is_floating_point():
            return x
        self._as_planes |= numbers < kernel.numel()
        if self._as_planes:
            return x.contiguous()
        return x if channels_are_last(x) else x.contiguous(memory_format=torch.channels_last)

    def for_users(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, which is whole, as users may see it."""
        return x.contiguous() if self.allowed and x.dim() == 4 else x

    def check_view(self, x: torch.Tensor, sizes: Sequence[int]) -> None:
        """Has images stay as they lie if `x` could not be viewed so with its channels side by side."""
        try:
            if x.dim() == 4:
                x.contiguous(memory_format=torch.channels_last).view(sizes)
        except RuntimeError:
            self.allowed = False


def laid_out_by_its_user(image: torch.Tensor) -> bool:
    """Returns whether channels lie side by side already: also a single one may be said to."""
    one_channel = image.dim() == 4 and image.size(1) == 1 == image.stride(1) < image.shape[2:].numel()
    return one_channel or channels_are_last(image)
