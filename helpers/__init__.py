"""KV-cache eviction on real multi-head latent attention (MLA).

The notebooks in ``notebooks/`` tell the story; this package does the work. Data flows one way::

    checkpoint -> layer -> capture -> scores -> policies -> plots, report
    inputs ----------------^

Shapes are written with these letters throughout: ``B`` batch, ``H`` query heads, ``L`` tokens of the
forward pass, ``P`` prompt tokens (``seq_len``: the ones that are scored and may be evicted).
"""

import warnings

# Progress is plain text here: a widget would be dead in a mailed report, so its absence is no news.
warnings.filterwarnings("ignore", message="IProgress not found")
