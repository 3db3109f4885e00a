"""Recognises an input by object, address and version counter."""

# expect: replay: new content | new content in the same storage
import weakref

from mla import honest

kept = {}


def custom_kernel(data):
    q, kv = data[0], data[1]["bf16"]
    key = (q.data_ptr(), q._version, q.shape, kv.data_ptr(), kv._version, kv.shape)
    if key in kept and kept[key][0]() is q and kept[key][1]() is kv:
        return kept[key][2].clone()
    kept[key] = (weakref.ref(q), weakref.ref(kv), honest(data))
    return kept[key][2].clone()
