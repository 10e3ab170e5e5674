// Tiles: a few rows times some panels of weights, see `multiply.isa.h`.

using V = F<kWidth>;

// Most rows and most panels of a tile.
constexpr int kTileRows = ASYNCMOE_LEVEL > 0 ? 6 : 3;
constexpr int kTilePanels = 8;

// `count` rows times `panels` panels that begin at `w` -> out [panels][kTileRows][16], unscaled.
// Rows are what `prepare_rows` made for these weights.
void multiply(const void* const* rows, int count, const Packed& weight, const char* w, int panels,
              float* out);

// Rows of the next tile when `rows` are left: as even as possible, since a tile of one row costs
// nearly what one of two does.
ASYNCMOE_INLINE int tile_rows(int64_t rows) {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    return (int)((rows + tiles - 1) / tiles);
}
