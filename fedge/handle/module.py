"""What an nn.Module must be to serve as a pure function of its parameters."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from fedge.core import Params


def parameters(module: nn.Module) -> Params:
    """A copy of the trainable parameters by the module's own names; frozen ones stay inside the module."""
    check_module(module)
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be a pure function of its parameters, by the name of the layer."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model is a {type(module).__name__}, it must be an nn.Module")
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        tracks = isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)
        if tracks and not is_still(layer):
            raise ValueError(
                f"layer '{name}' ({kind}) mixes the examples of a batch or keeps running statistics, which are "
                "not parameters and have no meaning across clients: use nn.GroupNorm or nn.LayerNorm in its place "
                "(fedge.models.without_batch_norm(model) does it), or, with the statistics of a trained model, freeze "
                "them: call .eval() on the layer"
            )
        if _has_spectral_norm(layer) and (layer.training or any(p.requires_grad for p in layer.parameters())):
            raise ValueError(
                f"layer '{name.split('.parametrizations.')[0]}' has a spectral norm, whose power iteration changes "
                "buffers at every step; these are not parameters and have no meaning across clients: remove it "
                "(torch.nn.utils.remove_spectral_norm or torch.nn.utils.parametrize.remove_parametrizations), or "
                "freeze the layer: .eval() and .requires_grad_(False)"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ValueError(
                f"layer '{name}' ({kind}) has max_norm={layer.max_norm:g}, which shortens its vectors in place when "
                "they are used, outside the gradient: set max_norm to None, and shorten what the layer puts out "
                "(torch.renorm) if the model needs it"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter '{name}' has no shape yet: run the lazy module on one batch first")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the model has no trainable parameters: at least one must require grad")


def _has_spectral_norm(layer: nn.Module) -> bool:
    """In either form of torch: a list of parametrisations, or a layer with a hook."""
    hooks = layer if isinstance(layer, ParametrizationList) else layer._forward_pre_hooks.values()
    return any(isinstance(hook, _SpectralNorm | SpectralNorm) for hook in hooks)


def is_still(layer: nn.Module) -> bool:
    """Whether it is a normalisation with statistics of its own in evaluation mode: it uses them, unchanged."""
    if _has_spectral_norm(layer):
        return not layer.training
    tracks = isinstance(layer, _BatchNorm | _InstanceNorm) and layer.track_running_stats
    return tracks and not layer.training and layer.running_mean is not None


def leave_weights_apart(module: nn.Module) -> None:
    """Keep recurrent layers from moving their weights into one block of a GPU's memory.

    torch does it whenever it sees new weights, which here is at every call: it asks where they lie, and the weights of
    many clients (vmap) lie nowhere; those of one belong to somebody else, who would find them moved.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        layer.flatten_parameters = _nothing  # type: ignore[method-assign]
    if any(weight.is_cuda for layer in layers for weight in layer.parameters()):
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous", UserWarning)


def _nothing() -> None:
    pass
