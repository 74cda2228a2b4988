"""The model classes of tasks, one file each; `flodl_hf.families.schema.tasks` is the table of their names."""
