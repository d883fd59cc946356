"""Devices that libllama can compute on."""

from pyllama_raw.native.libllama import Device, devices

__all__ = ["Device", "devices"]
