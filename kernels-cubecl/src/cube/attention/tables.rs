//! Which tiles of the score matrix a mask lets through: one mechanism for all masks, worked out on the host.
//!
//! The matrix is cut into tiles. A row of tiles has a list of runs, each of neighbouring tiles that are seen alike: in
//! full, or by one pattern of bits. Tiles that are hidden altogether are in no run. Equal patterns are kept once (all
//! tiles on the diagonal of a causal mask share one), and a run is as long as it can be, so that the tables of a mask with
//! some structure grow with the sequence, not with its square. (A [`MaskRule`](crate::MaskRule) without any has a
//! pattern for each of its tiles.)

use std::{collections::HashMap, ops::Range};

use crate::{Mask, Positions, Tile};

/// What stands for a pattern in a run of tiles that are seen in full.
pub const FULL: u32 = u32::MAX;

/// Ranges of positions that two sides of a tile may have before it is cut without asking the mask about each pair.
const PIECES: usize = 256;

/// The score matrix to cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Cut {
    pub mask: Mask,
    /// Positions of the queries, or of the keys if `transposed`.
    pub rows: Positions,
    /// Positions of the others.
    pub columns: Positions,
    pub transposed: bool,
    /// Rows of a tile.
    pub height: usize,
    /// Columns of a tile, a multiple of 32.
    pub width: usize,
}

/// Tiles `first..end` of a row of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub first: u32,
    pub end: u32,
    /// Which pattern they have, or [`FULL`].
    pub pattern: u32,
}

/// What a mask lets through.
#[derive(Debug, Default, PartialEq)]
pub struct Tables {
    /// For each row of tiles, its runs, ascending.
    pub rows: Vec<Vec<Run>>,
    /// Bits `[patterns, height, width / 32]`, the lowest of a word first: which pairs are seen. Those past the last row or
    /// column are not.
    pub patterns: Vec<u32>,
}

impl Tables {
    /// The tables as one array: where the runs of each row start, and those of the last end; the runs, three numbers
    /// each; the patterns.
    pub fn words(&self) -> Vec<u32> {
        let mut words = vec![0];
        let mut runs = 0;
        for row in &self.rows {
            runs += row.len() as u32;
            words.push(runs);
        }
        let all = self.rows.iter().flatten();
        words.extend(all.flat_map(|run| [run.first, run.end, run.pattern]));
        words.extend(&self.patterns);
        words
    }

    /// Where the patterns start in [`words`](Self::words).
    pub fn patterns_at(&self) -> usize {
        let runs: usize = self.rows.iter().map(Vec::len).sum();
        self.rows.len() + 1 + 3 * runs
    }
}

impl Cut {
    pub fn tables(&self) -> Tables {
        let sides = [(&self.rows, self.height), (&self.columns, self.width)];
        let [rows, columns] = sides.map(|(positions, size)| Side::new(positions, size));
        let mut search = Search {
            cut: self,
            tables: Tables {
                rows: vec![Vec::new(); rows.tiles()],
                patterns: Vec::new(),
            },
            known: HashMap::new(),
            rows: &rows,
            columns: &columns,
        };
        search.visit(0..rows.tiles(), 0..columns.tiles());
        let mut tables = search.tables;
        for row in &mut tables.rows {
            row.sort_by_key(|run| run.first);
            row.dedup_by(|next, run| {
                let joins = run.end == next.first && run.pattern == next.pattern;
                if joins {
                    run.end = next.end;
                }
                joins
            });
        }
        tables
    }
}

/// The positions along one side of the matrix.
struct Side<'a> {
    ranges: &'a [Range<usize>],
    /// Local index at which each range starts, and the last ends.
    starts: Vec<usize>,
    /// Local rows or columns in a tile.
    size: usize,
}

impl<'a> Side<'a> {
    fn new(positions: &'a Positions, size: usize) -> Self {
        let mut starts = vec![0];
        for range in positions.ranges() {
            starts.push(starts[starts.len() - 1] + range.len());
        }
        Self {
            ranges: positions.ranges(),
            starts,
            size,
        }
    }

    fn len(&self) -> usize {
        self.starts[self.ranges.len()]
    }

    fn tiles(&self) -> usize {
        self.len().div_ceil(self.size)
    }

    /// The runs of positions in these tiles, each with the local index of its first.
    fn pieces(&self, tiles: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + Clone + '_ {
        let local = tiles.start * self.size..self.len().min(tiles.end * self.size);
        let first = self.starts.partition_point(|&start| start <= local.start) - 1;
        let starts = self.starts[first..].iter().zip(&self.ranges[first..]);
        starts
            .take_while(move |(start, _)| **start < local.end)
            .map(move |(&start, range)| {
                let from = local.start.max(start);
                let to = local.end.min(start + range.len());
                (from, range.start + (from - start)..range.start + (to - start))
            })
    }
}

/// Halves the matrix until the mask has one answer for a part.
struct Search<'a> {
    cut: &'a Cut,
    rows: &'a Side<'a>,
    columns: &'a Side<'a>,
    tables: Tables,
    /// The number of each pattern seen before.
    known: HashMap<Vec<u32>, u32>,
}

impl Search<'_> {
    fn visit(&mut self, rows: Range<usize>, columns: Range<usize>) {
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        let single = rows.len() == 1 && columns.len() == 1;
        match self.ask(&rows, &columns, single) {
            Tile::Empty => {}
            Tile::Full => {
                // The last tile may have columns past the end, which a pattern hides. Rows there do no harm.
                let whole = columns.end.min(self.columns.len() / self.columns.size);
                for row in rows {
                    self.push(row, columns.start..whole, FULL);
                    (whole.max(columns.start)..columns.end).for_each(|column| self.compare(row, column));
                }
            }
            Tile::Mixed if single => self.compare(rows.start, columns.start),
            Tile::Mixed => {
                let half = |range: &Range<usize>| range.start + range.len() / 2;
                let wide = rows.len() * self.rows.size <= columns.len() * self.columns.size;
                if columns.len() == 1 || rows.len() > 1 && !wide {
                    self.visit(rows.start..half(&rows), columns.clone());
                    self.visit(half(&rows)..rows.end, columns);
                } else {
                    self.visit(rows.clone(), columns.start..half(&columns));
                    self.visit(rows, half(&columns)..columns.end);
                }
            }
        }
    }

    /// What the mask says of these tiles together.
    fn ask(&self, rows: &Range<usize>, columns: &Range<usize>, single: bool) -> Tile {
        let (rows, columns) = (self.rows.pieces(rows), self.columns.pieces(columns));
        if !single && rows.clone().take(PIECES).count() * columns.clone().take(PIECES).count() >= PIECES {
            return Tile::Mixed;
        }
        let mut answer = None;
        for (_, row) in rows {
            for (_, column) in columns.clone() {
                let (queries, keys) = if self.cut.transposed {
                    (&column, &row)
                } else {
                    (&row, &column)
                };
                let tile = self.cut.mask.tile(queries, keys);
                if tile == Tile::Mixed || answer.is_some_and(|answer| answer != tile) {
                    return Tile::Mixed;
                }
                answer = Some(tile);
            }
        }
        answer.unwrap_or(Tile::Empty)
    }

    /// Lists one tile by its bits.
    fn compare(&mut self, row: usize, column: usize) {
        let Cut { height, width, .. } = *self.cut;
        let mut bits = vec![0; height * width / 32];
        let mut seen = 0;
        let mut set = |row: usize, column: usize| {
            let (row, column) = (row % height, column % width);
            bits[row * (width / 32) + column / 32] |= 1 << (column % 32);
            seen += 1;
        };
        for (first_row, rows) in self.rows.pieces(&(row..row + 1)) {
            for (first_column, columns) in self.columns.pieces(&(column..column + 1)) {
                if self.cut.transposed {
                    for (i, query) in columns.clone().enumerate() {
                        let keys = self.cut.mask.runs(query, rows.clone()).flatten();
                        keys.for_each(|key| set(first_row + (key - rows.start), first_column + i));
                    }
                } else {
                    for (i, query) in rows.clone().enumerate() {
                        let keys = self.cut.mask.runs(query, columns.clone()).flatten();
                        keys.for_each(|key| set(first_row + i, first_column + (key - columns.start)));
                    }
                }
            }
        }
        let pattern = match seen {
            0 => return,
            _ if seen == height * width => FULL,
            _ => *self.known.entry(bits).or_insert_with_key(|bits| {
                let pattern = self.tables.patterns.len() / bits.len();
                self.tables.patterns.extend(bits);
                u32::try_from(pattern).expect("fewer than 2^32 patterns")
            }),
        };
        self.push(row, column..column + 1, pattern);
    }

    fn push(&mut self, row: usize, columns: Range<usize>, pattern: u32) {
        if !columns.is_empty() {
            let [first, end] =
                [columns.start, columns.end].map(|tile| u32::try_from(tile).expect("fewer than 2^32 tiles"));
            self.tables.rows[row].push(Run { first, end, pattern });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Blocks, MaskRule};

    #[derive(Debug)]
    struct Scattered;

    impl MaskRule for Scattered {
        fn visible(&self, query: usize, key: usize) -> bool {
            (query * 31 + key * 17 + query * key).is_multiple_of(3)
        }
    }

    fn masks(len: usize) -> Vec<Mask> {
        let blocks = Blocks::new(len / 5).with_first(len / 9);
        let documents = [len / 4, 1, 0, len / 3, len / 7];
        vec![
            Mask::Full,
            Mask::Causal,
            Mask::Window { size: 3, sink: 0 },
            Mask::Window { size: len / 4, sink: 2 },
            Mask::Window { size: 0, sink: len / 3 },
            Mask::documents(documents),
            Mask::whole_documents(documents),
            Mask::documents(documents).and(Mask::Window { size: 20, sink: 1 }),
            Mask::block_causal(blocks),
            Mask::BlockCausal {
                blocks,
                window: Some(len / 3),
                sink: len / 9,
            },
            Mask::TeacherForcing { blocks, half: len / 2 },
            Mask::custom(Scattered),
            Mask::custom(Scattered).and(Mask::whole_documents(documents)),
        ]
    }

    /// The whole matrix as the tables have it, with what they say of rows and columns past the end.
    fn seen(cut: &Cut, tables: &Tables) -> Vec<Vec<bool>> {
        let columns = cut.columns.len().next_multiple_of(cut.width);
        let mut seen = vec![vec![false; columns]; tables.rows.len() * cut.height];
        for (tile_row, runs) in tables.rows.iter().enumerate() {
            for run in runs {
                assert!(run.first < run.end);
                for (row, column) in (0..cut.height).flat_map(|row| {
                    let columns = run.first as usize * cut.width..run.end as usize * cut.width;
                    columns.map(move |column| (row, column))
                }) {
                    let words = cut.width / 32;
                    let word = (run.pattern as usize * cut.height + row) * words + column % cut.width / 32;
                    let bit = run.pattern == FULL || tables.patterns[word] >> (column % 32) & 1 == 1;
                    let cell = &mut seen[tile_row * cut.height + row][column];
                    assert!(!*cell, "two runs have the same tile");
                    *cell = bit;
                }
            }
            let apart = |pair: &[Run]| {
                pair[0].end < pair[1].first || pair[0].end == pair[1].first && pair[0].pattern != pair[1].pattern
            };
            assert!(runs.windows(2).all(apart), "{runs:?}");
        }
        seen
    }

    #[test]
    fn tables_agree_with_the_mask() {
        const LEN: usize = 300;
        let sides = [
            Positions::whole(LEN),
            Positions::new([0..70, 230..300]),
            Positions::new([75..149, 160..161, 170..230]),
            Positions::new((0..LEN).step_by(3).map(|at| at..at + 1)),
            Positions::new([]),
        ];
        for mask in masks(LEN) {
            for (rows, columns) in sides
                .iter()
                .flat_map(|rows| sides.iter().map(move |columns| (rows, columns)))
            {
                for (transposed, height, width) in
                    [(false, 64, 32), (true, 64, 32), (false, 32, 128), (false, 128, 128)]
                {
                    let cut = Cut {
                        mask: mask.clone(),
                        rows: rows.clone(),
                        columns: columns.clone(),
                        transposed,
                        height,
                        width,
                    };
                    let tables = cut.tables();
                    assert_eq!(tables.rows.len(), rows.len().div_ceil(height));
                    let seen = seen(&cut, &tables);
                    for (seen, row) in seen.iter().zip(rows.iter()) {
                        for (seen, column) in seen.iter().zip(columns.iter()) {
                            let [query, key] = if transposed { [column, row] } else { [row, column] };
                            assert_eq!(*seen, mask.visible(query, key), "{cut:?}, query {query}, key {key}");
                        }
                        assert!(!seen[columns.len()..].contains(&true), "{cut:?}: columns past the end");
                    }
                }
            }
        }
    }

    #[test]
    fn words_are_offsets_runs_and_patterns() {
        let tables = Cut {
            mask: Mask::Causal,
            rows: Positions::whole(128),
            columns: Positions::whole(128),
            transposed: false,
            height: 64,
            width: 64,
        }
        .tables();
        let diagonal: Vec<u32> = (0..64u32)
            .flat_map(|row| {
                let bits = u64::MAX >> (63 - row);
                [bits as u32, (bits >> 32) as u32]
            })
            .collect();
        assert_eq!(tables.patterns, diagonal);
        let words = tables.words();
        assert_eq!(words[..12], [0, 1, 3, 0, 1, 0, 0, 1, FULL, 1, 2, 0]);
        assert_eq!(tables.patterns_at(), 12);
        assert_eq!(words[12..], diagonal);
    }

    /// A million causal tokens: two runs a row, and one pattern, however they are cut.
    #[test]
    fn tables_grow_with_the_sequence() {
        for transposed in [false, true] {
            let cut = Cut {
                mask: Mask::Causal,
                rows: Positions::whole(1 << 20),
                columns: Positions::whole(1 << 20),
                transposed,
                height: 64,
                width: 32,
            };
            let tables = cut.tables();
            assert_eq!(tables.patterns.len(), 2 * 64);
            assert!(tables.rows.iter().all(|runs| runs.len() <= 3));
        }
    }
}
