"""The functional interface: one module for each operator family."""

from .depthwise import depthwise_conv1d, depthwise_conv2d, depthwise_conv3d, depthwise_conv_transpose2d

__all__ = ["depthwise_conv1d", "depthwise_conv2d", "depthwise_conv3d", "depthwise_conv_transpose2d"]
