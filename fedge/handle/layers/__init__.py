"""Layers with a written-down gradient. A new kind is one file here and one line in this table."""

from __future__ import annotations

from fedge.handle.layer import Layer
from fedge.handle.layers.conv2d import Conv2d
from fedge.handle.layers.dropout import Dropout
from fedge.handle.layers.flatten import Flatten
from fedge.handle.layers.linear import Linear
from fedge.handle.layers.max_pool2d import MaxPool2d
from fedge.handle.layers.relu import ReLU
from fedge.handle.layers.sigmoid import Sigmoid
from fedge.handle.layers.tanh import Tanh

KINDS: list[type[Layer]] = [Linear, Conv2d, MaxPool2d, Flatten, Dropout, ReLU, Tanh, Sigmoid]
