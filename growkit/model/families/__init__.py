"""Model families: tensor names and axes as data, one file each."""
