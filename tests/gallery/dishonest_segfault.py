"""Reads address zero."""

# expect: attention: contest inputs | killed by signal 11 (SIGSEGV)
import ctypes


def custom_kernel(data):
    return ctypes.string_at(0)
