"""kvferry inside engines that load connectors from outside their tree. Nothing here is imported by the rest."""
