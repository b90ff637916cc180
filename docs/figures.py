"""Make the picture that the README shows: `make figures`."""

from pathlib import Path

from neuromanifold.reports.core_space import core_path, plot_core_path, save_figure

if __name__ == "__main__":
    print(save_figure(plot_core_path(core_path()), Path(__file__).parent / "images" / "core-space.png"))
