"""Read ``config.json``: strictly, by tables, with the text stored for export.

    file              find the file in a folder and read it as strict JSON
    model_config      its meaning: typed settings, labels, the source text
    labels            names of labels, their minimum scores, the activation of scores
    warnings          warnings about ignored settings

`flodl_hf.families.schema.config_rows` maps one key to one field.
"""
