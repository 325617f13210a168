"""The DIFF Transformer, and the layouts of differential attention."""

from growkit.extras.differential.attention_facts import describe_attention
from growkit.extras.differential.diff_family import FAMILY
from growkit.extras.differential.layouts import as_diff_transformer, read_layout
from growkit.planning.own_class import OwnClass

OWN_CLASS = OwnClass(
    family=FAMILY,
    runs=lambda family: family.form is not None,
    config=as_diff_transformer,
    plan=read_layout,
    attention=describe_attention,
)
