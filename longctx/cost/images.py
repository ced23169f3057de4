"""The cost of images in a step: of the vision tower, its pixels, and the features that it makes.

P patches and F features of all images of a batch; H the hidden size of the tower, D that of the
language model.

    FLOPs   2 (patch parameters * P + feature parameters * F)  matmuls, the patches' embedding too
            + 4 H * pairs of patches that attend to each other  attention, both ways
            A tower that trains does this again in backward, where there are several groups
            (images/tower.py), and 2 times (matmuls) and 2.5 times (attention) as much for
            gradients.
    bytes   the tower's weights, throughout, or while it runs if they wait on the host;
            2 per number of the pixels, which batches have in the tower's dtype;
            in forward 2 D F of features, twice, since Hugging Face's code joins those of all
            images and holds both, once more for each of deepstack's levels, and 2 H P of hidden
            states that its output holds;
            in backward deepstack's features alone, which the first layers have saved;
            while the tower runs, the activations of one group: of one layer where the tower is
            frozen, of all where it trains; these stay until its backward if it is the only group;
            then 9 D F while features are put among the embedded tokens (Tensor.masked_scatter).

The gradients and states of a tower that trains are those of a block of the model
(families/blocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from longctx.cost.fitted import TOWER_GRADIENT_LAUNCHES, TOWER_LAUNCH_S, TOWER_LAUNCHES
from longctx.cost.launches import together
from longctx.cost.peak import Buffers, Phase, Standing
from longctx.cost.rates import Rates

PLACING = 9
"""Bytes of GPU memory that torch's masked_scatter needs per number of a row while it puts features
among the embedded tokens: a mask and its cumulative sum in 64 bits."""
WORKING = 25
"""Elements per patch that a tower's layer needs while it computes, as multiples of H: 56 KiB for
Qwen3-VL-8B, most of them q and k in fp32, to which RoPE is applied."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward, divided by those of its forward."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """The size of an image, in the tower and in a row."""

    width: int
    """Columns of pixels that reach the tower."""
    height: int
    """Rows of pixels that reach the tower."""
    patches: int
    features: int
    """Vectors of D numbers that the image puts among the row's embedded tokens."""
    tokens: int
    """Tokens of the row: one per feature, and those that mark the image's ends and lines."""
    pairs: int
    """Ordered pairs of patches that attend to each other, summed over layers."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of a vision tower, with the modules that merge and project its output."""

    parameters: int
    """All parameters of the tower."""
    patch_parameters: int
    """Parameters by which each patch is multiplied."""
    feature_parameters: int
    """Parameters by which each feature is multiplied."""
    hidden: int  # H
    features: int  # D
    layers: int
    saved: int
    """Elements per patch that a layer saves for backward."""
    numbers: int
    """Numbers of a patch's pixels, all channels and frames together."""
    states: int
    """Hidden states per patch that the tower's output holds besides features."""
    deepstack: int
    """The number of layers of the language model to which the tower gives features of deeper
    levels."""
    masks: bool
    """Whether attention computes all pairs of a group and masks those of different images."""
    itemsize: int
    """Bytes of an activation's element."""
    frozen_group: int
    """Patches that a frozen tower computes together, unless an image has more."""
    trained_group: int
    """Patches that a tower in training computes together, unless an image has more."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images of a batch on one GPU, all of one size."""

    tower: Tower
    image: Image
    count: int
    trained: bool = False
    """Whether the tower is trained."""
    away: bool = False
    """Whether the tower's weights wait on the host while it does not run."""

    @property
    def patches(self) -> int:
        return self.count * self.image.patches

    @property
    def features(self) -> int:
        return self.count * self.image.features

    @property
    def group(self) -> int:
        """The number of images that the tower computes together."""
        most = self.tower.trained_group if self.trained else self.tower.frozen_group
        return min(self.count, max(1, most // self.image.patches))

    @property
    def groups(self) -> int:
        return -(-self.count // self.group)

    @property
    def forwards(self) -> int:
        """The number of the tower's forwards for a batch: two if it is trained in several groups,
        which are recomputed in backward."""
        return 1 + (self.trained and self.groups > 1)

    # --- FLOPs and seconds -----------------------------------------------------------------------

    @property
    def matmul_flops(self) -> float:
        """FLOPs of the tower's matmuls in a forward."""
        tower = self.tower
        per_patch = tower.patch_parameters * self.patches
        return 2.0 * (per_patch + tower.feature_parameters * self.features)

    @property
    def attention_flops(self) -> float:
        """FLOPs of the tower's attention in a forward."""
        pairs = self.group * self.image.pairs if self.tower.masks else self.image.pairs
        return 4.0 * self.tower.hidden * pairs * self.count

    @property
    def flops(self) -> float:
        """FLOPs of the tower in a forward and a backward."""
        matmuls, attention = self.matmul_flops, self.attention_flops
        found = self.forwards * (matmuls + attention)
        return found + self.trained * (2 * matmuls + ATTENTION_BACKWARD * attention)

    @property
    def kernels(self) -> int:
        """Kernels of the tower's layers in a forward and a backward."""
        each = self.forwards * TOWER_LAUNCHES + self.trained * TOWER_GRADIENT_LAUNCHES
        return self.groups * self.tower.layers * each

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of a batch: the tower's kernels, and the waits for Python, which
        launches as many kernels for a group of few images as for one of many."""
        return together(self.flops / rates.of("tower"), self.kernels * TOWER_LAUNCH_S)

    # --- bytes -----------------------------------------------------------------------------------

    @property
    def feature_bytes(self) -> int:
        """Bytes of all features, without deepstack's."""
        return self.features * self.tower.features * self.tower.itemsize

    @property
    def _weights(self) -> Buffers:
        """Bytes of a frozen tower's weights; 0 for a trained tower, which is a block of the
        model."""
        nbytes = 0 if self.trained else self.tower.parameters * self.tower.itemsize
        return {"vision tower": nbytes}

    @cached_property
    def standing(self) -> Buffers:
        """Buffers that exist throughout a step: a frozen tower's weights, and pixels."""
        return {
            **({"vision tower": 0} if self.away else self._weights),
            "pixels": self.tower.itemsize * self.tower.numbers * self.patches,
        }

    @cached_property
    def forward(self) -> Buffers:
        """Buffers of images while the language model's layers run forward. Hugging Face's code
        holds the tower's output and a joined copy of its features."""
        tower = self.tower
        states = tower.states * tower.hidden * tower.itemsize * self.patches
        copies = 2 + tower.deepstack
        features = copies * self.feature_bytes + states
        return {**self.standing, "features of images": features, **self._kept}

    @cached_property
    def backward(self) -> Buffers:
        """Buffers of images from the loss to the end of the layers' backward."""
        saved = self.tower.deepstack * self.feature_bytes
        return {**self.standing, "features of images": saved, **self._kept}

    @property
    def _kept(self) -> Buffers:
        """Bytes that a tower in training saves for backward if all images are one group; otherwise
        empty, since its groups are recomputed."""
        if not self.trained or self.groups > 1:
            return {}
        saved = self.tower.layers * self.tower.saved
        return {"a group of images": saved * self.patches * self.tower.itemsize}

    @property
    def forward_bytes(self) -> int:
        return sum(self.forward.values())

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch's pixels and features in forward, without the tower's weights."""
        return self.forward_bytes - self.standing["vision tower"]

    def group_bytes(self, *, backward: bool = False) -> int:
        """Bytes of the tower's activations of one group, in forward or in backward."""
        tower, patches = self.tower, self.group * self.image.patches
        elements = WORKING * tower.hidden
        # One layer's working memory is needed beside what all layers have saved.
        if backward or self._kept:
            elements += tower.layers * tower.saved
        mask = patches**2 if tower.masks else 0
        return (elements * patches + mask) * tower.itemsize

    def tower_buffers(self, *, backward: bool = False) -> Buffers:
        """Returns the buffers of images while the tower runs the last of its groups, forward or
        backward. In forward they have room for the features that are put among the embedded tokens
        afterwards."""
        held, group = self.forward["features of images"], self.group_bytes(backward=backward)
        if backward:  # beside the gradients of features
            held = self.backward["features of images"] + self.feature_bytes
        else:
            group = max(group, PLACING * self.features * self.tower.features)
        here = {**self.standing, **self._weights}
        return {**here, "features of images": held, "a group of images": group}


def with_images(phases: Sequence[Phase], images: Images, standing: Standing) -> list[Phase]:
    """Returns a step's phases with the buffers of images in each, and with the tower's own phases:
    one before the layers' forward, and for a tower in training one after their backward."""
    first, *rest = phases
    tower_buffers = {"gradients": standing.old_gradients(0), **images.tower_buffers()}
    found = [
        Phase("images", {**standing.forward(), **tower_buffers}),
        Phase(first.name, {**first.buffers, **images.forward}),
        *(Phase(phase.name, {**phase.buffers, **images.backward}) for phase in rest),
    ]
    if images.trained:
        after = {**standing.backward(-1), "gradients": standing.all_gradients()}
        after |= images.tower_buffers(backward=True)
        # The last phase is the update, which begins after the tower has its gradients.
        found.insert(-1, Phase("images' gradients", after))
    return found
