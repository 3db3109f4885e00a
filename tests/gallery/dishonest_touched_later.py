"""Right when it returns; a thread scribbles over it afterwards."""

# expect: repeat, late output | written late
import threading
import time

from mla import honest


def custom_kernel(data):
    out = honest(data)

    def work():
        time.sleep(0.05)
        out.zero_()

    threading.Thread(target=work).start()
    return out
