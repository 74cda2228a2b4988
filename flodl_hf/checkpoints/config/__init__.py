"""Read ``config.json``: strictly, by tables, with the text stored for export.

    file              find the file in a folder and read and change its JSON; labels, thresholds, activations
    model_config      its meaning: typed settings, labels, the source text

`flodl_hf.families.schema.config_rows` maps one key to one field.
"""
